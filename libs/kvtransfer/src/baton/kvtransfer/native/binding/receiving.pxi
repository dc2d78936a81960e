# Inboxes, and the threads that look after them.

cdef class Inbox:
    cdef Held[CInbox] ptr

    @property
    def table_address(self):
        return self.ptr.get().table().address()

    @property
    def table_bytes(self):
        return self.ptr.get().table().num_bytes()

    def table_key(self) -> bytes:
        return (<CMemory *>&self.ptr.get().table()).pack_key()

    @property
    def shared_address(self):
        cdef string address = self.ptr.get().shared_address()
        return <bytes>address

    @property
    def network_address(self):
        cdef string address = self.ptr.get().network_address()
        return <bytes>address

    @property
    def network_table_key(self):
        cdef string key = self.ptr.get().network_table_key()
        return <bytes>key

    def arm(self, uint64_t room, uint32_t generation):
        """-> a slot, -1 full, -2 shut."""
        return self.ptr.get().arm(room, generation)

    def disarm(self, uint32_t slot):
        return self.ptr.get().disarm(slot)

    def poll(self):
        """-> [(room, generation, flags, num_tokens, first_token, digest, last_layer_ns), ...]"""
        cdef vector[Record] records = self.ptr.get().poll()
        return [
            (r.room, r.generation, r.flags, r.num_tokens, r.first_token, r.digest, r.last_layer_ns)
            for r in records
        ]

    @property
    def counters(self):
        cdef CInboxCounters c = self.ptr.get().counters()
        return c.num_rung, c.num_stale, c.num_invalid, c.num_found_by_backstop

    @property
    def links(self):
        """None: its worker is busy."""
        cdef vector[uint64_t] found
        cdef bint is_known
        with nogil:
            is_known = self.ptr.get().list_links(found)
        return list(found) if is_known else None

    def link_info(self, uint64_t link):
        cdef string info
        with nogil:
            info = self.ptr.get().link_info(link)
        return info.decode()

    @property
    def has_no_writers(self):
        return self.ptr.get().has_no_writers()


cdef class Receiver:
    cdef Held[CReceiver] ptr

    def __init__(self, Memory bell not None, int device, Notices notices not None, bint has_network, bint shared):
        self.ptr = Held[CReceiver](shared_ptr[CReceiver](new CReceiver(bell.ptr, device, notices.ptr, has_network, shared)))

    def open_inbox(self, uint64_t inbox_id, uint64_t nonce, uint32_t num_doorbells, Context shared, network):
        """shared: None without shared memory. network: (pool, scratch, bell) in the context of networks; None: nobody comes over one."""
        cdef Inbox inbox = Inbox.__new__(Inbox)
        cdef shared_ptr[CInbox] opened
        cdef shared_ptr[CContext] context
        cdef CNetworkWay way
        if shared is not None:
            context = shared.ptr
        if network is not None:
            way.pool, way.scratch, way.bell = (<Memory?>network[0]).ptr, (<Memory?>network[1]).ptr, (<Memory?>network[2]).ptr
        with nogil:
            opened = self.ptr.get().open_inbox(inbox_id, nonce, num_doorbells, context, way)
        inbox.ptr = Held[CInbox](opened)
        return inbox

    def armed(self):
        with nogil:
            self.ptr.get().armed()

    def shut(self, Inbox inbox not None):
        with nogil:
            self.ptr.get().shut(inbox.ptr)

    def forget(self, Inbox inbox not None):
        with nogil:
            self.ptr.get().forget(inbox.ptr)

    def stop(self):
        with nogil:
            self.ptr.get().stop()
