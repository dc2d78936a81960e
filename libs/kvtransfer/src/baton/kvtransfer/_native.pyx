# distutils: language = c++
# cython: language_level=3
"""Binding of the native core. Long calls run without the GIL. Nothing here decides anything: see ucx/ for that."""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr
from libcpp.string cimport string
from libcpp.utility cimport pair
from libcpp.vector cimport vector

from baton.kvtransfer.errors import UCXError

cdef extern from "binding.hpp" namespace "baton":
    void set_error_type(object type)
    void raise_failure()

cdef extern from "api.hpp" namespace "baton":
    cdef struct LibraryInfo:
        string path
        string version
        vector[string] missing
        string problem
    LibraryInfo c_load_library "baton::load_library"(const string &path) nogil

cdef extern from "context.hpp" namespace "baton":
    cdef cppclass CContext "baton::Context":
        CContext(const vector[pair[string, string]] &options, int device) except +raise_failure

cdef extern from "cuda.hpp" namespace "baton":
    string cuda_export(uint64_t address) except +raise_failure

cdef extern from "memory.hpp" namespace "baton":
    cdef cppclass CMemory "baton::Memory":
        @staticmethod
        shared_ptr[CMemory] allocate(shared_ptr[CContext] context, size_t num_bytes, cbool shared) except +raise_failure nogil
        @staticmethod
        shared_ptr[CMemory] allocate_device(shared_ptr[CContext] context, size_t num_bytes) except +raise_failure nogil
        @staticmethod
        shared_ptr[CMemory] adopt(shared_ptr[CContext] context, uint64_t address, size_t num_bytes) except +raise_failure nogil
        uint64_t address()
        size_t num_bytes()
        int type()
        string pack_key() except +raise_failure

cdef extern from "doorbell.hpp" namespace "baton":
    cdef struct Record:
        uint64_t room
        uint32_t generation
        uint32_t flags
        uint32_t num_tokens
        int32_t first_token
        uint64_t digest
        uint64_t last_layer_ns
        uint64_t nonce
        uint64_t checksum

cdef extern from "notices.hpp" namespace "baton":
    ctypedef enum CNoticeKind "baton::NoticeKind":
        pass
    cdef struct CNotice "baton::Notice":
        CNoticeKind kind
        uint64_t id
    cdef cppclass CNotices "baton::Notices":
        CNotices()
        vector[CNotice] wait() nogil
        void close()

cdef extern from "endpoint.hpp" namespace "baton":
    cdef struct CWindow "baton::Window":
        uint64_t address
        uint64_t num_bytes
        string key

cdef extern from "write.hpp" namespace "baton":
    ctypedef enum CWriteState "baton::WriteState":
        pass
    cdef cppclass CWrite "baton::Write":
        long post(const int64_t *rows, size_t n, uint64_t ready_event) nogil
        long finish(uint32_t slot, Record record) nogil
        void cancel() nogil
        uint64_t id()
        uint64_t room()
        CWriteState state()
        int64_t num_bytes()
        int64_t num_puts()
        int64_t first_post_ns()
        int64_t busy_ns()
        int64_t done_ns()
        int error_status()
        const string &error_text()

cdef extern from "link.hpp" namespace "baton":
    cdef cppclass CLinkParams "baton::LinkParams":
        CLinkParams()
        uint64_t id
        string worker_address
        CWindow pool
        CWindow table
        CWindow bell
        CWindow scratch
        uint64_t nonce
        uint32_t num_doorbells
        cbool same_host
        int pidfd
        shared_ptr[CMemory] source
        string device_pool
        string device_scratch
        int max_in_flight
        int64_t max_put_bytes
    ctypedef enum CLinkState "baton::LinkState":
        pass
    ctypedef enum CPath "baton::Path":
        pass
    cdef cppclass CLink "baton::Link":
        CLink(shared_ptr[CQueue] queue, CLinkParams params)
        void connect(int64_t timeout_ns) except +raise_failure nogil
        shared_ptr[CWrite] begin(uint64_t write_id, uint64_t room) nogil
        double probe(shared_ptr[CMemory] local, int64_t num_bytes, cbool is_write, int64_t timeout_ns) except +raise_failure nogil
        void close() nogil
        CLinkState state()
        const string &transports()
        const string &info()
        CPath path()
        string failure_text()

cdef extern from "queue.hpp" namespace "baton":
    cdef cppclass CQueue "baton::Queue":
        CQueue(shared_ptr[CContext] context, shared_ptr[CNotices] notices, int spin_us) except +raise_failure
        void stop() nogil
        int num_links()

cdef extern from "inbox.hpp" namespace "baton":
    cdef struct CInboxCounters "baton::InboxCounters":
        uint64_t num_rung
        uint64_t num_stale
        uint64_t num_invalid
        uint64_t num_found_by_backstop
    cdef cppclass CInbox "baton::Inbox":
        const CMemory &table()
        const string &worker_address()
        int arm(uint64_t room, uint32_t generation)
        cbool disarm(uint32_t slot)
        cbool has_armed()
        vector[Record] poll()
        CInboxCounters counters()
        cbool has_no_writers()

cdef extern from "receiver.hpp" namespace "baton":
    cdef cppclass CReceiver "baton::Receiver":
        CReceiver(shared_ptr[CContext] context, shared_ptr[CNotices] notices, cbool has_network, cbool shared) except +raise_failure
        const CMemory &bell()
        shared_ptr[CInbox] open_inbox(uint64_t id, uint64_t nonce, uint32_t num_doorbells, shared_ptr[CMemory] pool,
                                      shared_ptr[CMemory] scratch) except +raise_failure nogil
        void armed() nogil
        void shut(const shared_ptr[CInbox] &inbox) nogil
        void forget(const shared_ptr[CInbox] &inbox) nogil
        void stop() nogil

set_error_type(UCXError)


def load_library(path: str):
    """-> (path, version, names of missing functions, the loader's problem). The first usable library stays for the life of the process."""
    cdef LibraryInfo info
    cdef string encoded = path.encode()
    with nogil:
        info = c_load_library(encoded)
    return info.path.decode(), info.version.decode(), [name.decode() for name in info.missing], info.problem.decode()


cdef class Context:
    cdef shared_ptr[CContext] ptr

    def __init__(self, options: dict, int device):
        cdef vector[pair[string, string]] pairs
        for name, value in options.items():
            pairs.push_back(pair[string, string](name.encode(), value.encode()))
        self.ptr = make_shared_context(pairs, device)


cdef shared_ptr[CContext] make_shared_context(const vector[pair[string, string]] &pairs, int device) except *:
    return shared_ptr[CContext](new CContext(pairs, device))


cdef class Memory:
    """Registered memory. Its buffer keeps it alive: `release` only lets go of this object's own hold."""

    cdef shared_ptr[CMemory] ptr
    cdef readonly uint64_t address
    cdef readonly size_t num_bytes
    cdef readonly bint is_host

    def __init__(self):
        raise TypeError("use allocate or adopt")

    @staticmethod
    def allocate(Context context not None, size_t num_bytes, bint shared):
        cdef shared_ptr[CMemory] ptr
        with nogil:
            ptr = CMemory.allocate(context.ptr, num_bytes, shared)
        return Memory._wrap(ptr)

    @staticmethod
    def allocate_device(Context context not None, size_t num_bytes):
        cdef shared_ptr[CMemory] ptr
        with nogil:
            ptr = CMemory.allocate_device(context.ptr, num_bytes)
        return Memory._wrap(ptr)

    @staticmethod
    def adopt(Context context not None, uint64_t address, size_t num_bytes):
        cdef shared_ptr[CMemory] ptr
        with nogil:
            ptr = CMemory.adopt(context.ptr, address, num_bytes)
        return Memory._wrap(ptr)

    @staticmethod
    cdef Memory _wrap(shared_ptr[CMemory] ptr):
        cdef Memory self = Memory.__new__(Memory)
        self.ptr = ptr
        self.address = ptr.get().address()
        self.num_bytes = ptr.get().num_bytes()
        self.is_host = ptr.get().type() == 0
        return self

    def pack_key(self) -> bytes:
        return self.ptr.get().pack_key()

    def export_device(self) -> bytes:
        """What another process needs to map this device memory. Raises UCXError where it cannot be shared."""
        return cuda_export(self.address)

    def __getbuffer__(self, Py_buffer *view, int flags):
        if not self.is_host:
            raise BufferError("device memory has no buffer")
        PyBuffer_FillInfo(view, self, <void *><size_t>self.address, self.num_bytes, 0, flags)


cdef class Notices:
    cdef shared_ptr[CNotices] ptr

    def __init__(self):
        self.ptr = make_shared[CNotices]()

    def wait(self):
        """Blocks without the GIL. -> [(kind, id), ...]; empty after close."""
        cdef vector[CNotice] taken
        with nogil:
            taken = self.ptr.get().wait()
        return [(<int>notice.kind, notice.id) for notice in taken]

    def close(self):
        self.ptr.get().close()


cdef class Queue:
    cdef shared_ptr[CQueue] ptr

    def __init__(self, Context context not None, Notices notices not None, int spin_us):
        self.ptr = shared_ptr[CQueue](new CQueue(context.ptr, notices.ptr, spin_us))

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
    cdef shared_ptr[CLink] ptr

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
        self.ptr = shared_ptr[CLink](new CLink(queue.ptr, params))

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
        """0: stores, 1: puts, 2: messages."""
        return <int>self.ptr.get().path()

    @property
    def failure(self):
        return self.ptr.get().failure_text().decode()


cdef class Write:
    cdef shared_ptr[CWrite] ptr

    @staticmethod
    cdef Write _wrap(shared_ptr[CWrite] ptr):
        cdef Write self = Write.__new__(Write)
        self.ptr = ptr
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

    @property
    def error(self):
        """(status, text); meaningful once failed."""
        return self.ptr.get().error_status(), self.ptr.get().error_text().decode()


cdef class Inbox:
    cdef shared_ptr[CInbox] ptr

    @property
    def table_address(self):
        return self.ptr.get().table().address()

    @property
    def table_bytes(self):
        return self.ptr.get().table().num_bytes()

    def table_key(self) -> bytes:
        return (<CMemory *>&self.ptr.get().table()).pack_key()

    @property
    def worker_address(self):
        cdef string address = self.ptr.get().worker_address()
        return <bytes>address

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
    def has_no_writers(self):
        return self.ptr.get().has_no_writers()


cdef class Receiver:
    cdef shared_ptr[CReceiver] ptr

    def __init__(self, Context context not None, Notices notices not None, bint has_network, bint shared):
        self.ptr = shared_ptr[CReceiver](new CReceiver(context.ptr, notices.ptr, has_network, shared))

    @property
    def bell_address(self):
        return self.ptr.get().bell().address()

    @property
    def bell_bytes(self):
        return self.ptr.get().bell().num_bytes()

    def bell_key(self) -> bytes:
        return (<CMemory *>&self.ptr.get().bell()).pack_key()

    def open_inbox(self, uint64_t inbox_id, uint64_t nonce, uint32_t num_doorbells, Memory pool not None, Memory scratch not None):
        cdef Inbox inbox = Inbox.__new__(Inbox)
        with nogil:
            inbox.ptr = self.ptr.get().open_inbox(inbox_id, nonce, num_doorbells, pool.ptr, scratch.ptr)
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
