# Queues, links, writes.

cdef class Queue:
    cdef Held[CQueue] ptr

    def __init__(self, Context context, int device, Notices notices not None, int spin_us):
        """context: of links on this host; None: links over networks, which bring their own."""
        cdef shared_ptr[CContext] shared
        cdef CQueue *made
        if context is not None:
            shared = context.ptr
        with nogil:
            made = new CQueue(shared, device, notices.ptr, spin_us)
        self.ptr = Held[CQueue](shared_ptr[CQueue](made))

    def __dealloc__(self):
        # the last link may go on the queue's own thread, which cannot wait for itself: it ends while somebody else holds the queue
        if self.ptr.get() != NULL and not self.ptr.is_inherited():
            with nogil:
                self.ptr.get().stop()

    @property
    def num_links(self):
        return self.ptr.get().num_links()

    def stop(self):
        with nogil:
            self.ptr.get().stop()


cdef CWindow _window(window):
    cdef CWindow native
    native.address, native.num_bytes, native.key = window.address, window.num_bytes, window.key
    return native


cdef class Link:
    cdef Held[CLink] ptr

    def __init__(self, Queue queue not None, invitation, Memory source not None, uint64_t link_id, bint same_host, int pidfd, int max_in_flight,
                 int64_t max_put_bytes, bytes device_pool not None, bytes device_scratch not None):
        cdef CLinkParams params
        params.id = link_id
        params.worker_address = invitation.worker
        params.pool = _window(invitation.pool)
        params.table = _window(invitation.table)
        params.bell = _window(invitation.bell)
        params.scratch = _window(invitation.scratch)
        params.nonce = invitation.nonce
        params.num_doorbells = invitation.num_doorbells
        params.same_host = same_host
        params.pidfd = pidfd
        params.source = source.ptr
        params.device_pool, params.device_scratch = device_pool, device_scratch
        params.max_in_flight = max_in_flight
        params.max_put_bytes = max_put_bytes
        cdef CLink *made
        with nogil:
            made = new CLink(queue.ptr, params)
        self.ptr = Held[CLink](shared_ptr[CLink](made))

    def connect(self, int64_t timeout_ns):
        with nogil:
            self.ptr.get().connect(timeout_ns)

    def begin(self, uint64_t write_id, uint64_t room):
        """None: lost or closed."""
        cdef shared_ptr[CWrite] write
        with nogil:
            write = self.ptr.get().begin(write_id, room)
        return None if write.get() == NULL else Write._wrap(write)

    def probe(self, Memory local not None, int64_t num_bytes, bint is_write, int64_t timeout_ns):
        cdef double speed
        cdef shared_ptr[CMemory] memory = local.ptr
        with nogil:
            speed = self.ptr.get().probe(memory, num_bytes, is_write, timeout_ns)
        return speed

    def lose(self, why: str):
        cdef string text = why.encode()
        with nogil:
            self.ptr.get().lose(text)

    def close(self):
        with nogil:
            self.ptr.get().close()

    @property
    def state(self):
        return <int>self.ptr.get().state()

    @property
    def transports(self):
        return self.ptr.get().transports().decode()

    @property
    def info(self):
        return self.ptr.get().info().decode()

    @property
    def path(self):
        """0: stores, 1: puts, 2: messages, 3: kernel."""
        return <int>self.ptr.get().path_kind()

    @property
    def failure(self):
        return self.ptr.get().failure_text().decode()


cdef class Write:
    cdef Held[CWrite] ptr

    @staticmethod
    cdef Write _wrap(shared_ptr[CWrite] ptr):
        cdef Write self = Write.__new__(Write)
        self.ptr = Held[CWrite](ptr)
        return self

    def post(self, const int64_t[:, ::1] rows not None, uint64_t ready):
        """-> -1 accepted, -2 refused, else the first row outside a region."""
        cdef size_t n = rows.shape[0]
        cdef const int64_t *first = &rows[0, 0] if n else NULL
        cdef long result
        with nogil:
            result = self.ptr.get().post(first, n, ready)
        return result

    def finish(self, uint32_t slot, doorbell):
        cdef Record record
        cdef long result
        record.room = doorbell.room
        record.generation = doorbell.generation
        record.flags = doorbell.status | (<uint32_t>bool(doorbell.has_digest) << 16)
        record.num_tokens = doorbell.num_tokens
        record.first_token = doorbell.first_token
        record.digest = doorbell.digest
        record.last_layer_ns = doorbell.last_layer_ns
        with nogil:
            result = self.ptr.get().finish(slot, record)
        return result

    def cancel(self):
        with nogil:
            self.ptr.get().cancel()

    @property
    def id(self):
        return self.ptr.get().id()

    @property
    def room(self):
        return self.ptr.get().room()

    @property
    def state(self):
        return <int>self.ptr.get().state()

    @property
    def num_bytes(self):
        return self.ptr.get().num_bytes()

    @property
    def num_puts(self):
        return self.ptr.get().num_puts()

    @property
    def first_post_ns(self):
        return self.ptr.get().first_post_ns()

    @property
    def busy_ns(self):
        return self.ptr.get().busy_ns()

    @property
    def done_ns(self):
        return self.ptr.get().done_ns()

    def parts(self):
        """Rows of three int64: begin, end (ns), bytes; of each post once DONE."""
        cdef vector[CWritePart] parts
        with nogil:
            parts = self.ptr.get().parts()
        return (<const char *>parts.data())[: parts.size() * sizeof(CWritePart)] if parts.size() else b""

    @property
    def error(self):
        """(status, text); meaningful once failed."""
        return self.ptr.get().error_status(), self.ptr.get().error_text().decode()
