# The C++ side, as far as Python sees it.

cdef extern from "binding.hpp" namespace "baton":
    void set_error_type(object type)
    void raise_failure()
    cdef cppclass Held[T](shared_ptr[T]):
        Held()
        Held(shared_ptr[T])
        T *get() nogil
        cbool is_inherited()

cdef extern from "api.hpp" namespace "baton":
    cdef struct LibraryInfo:
        string path
        string version
        vector[string] missing
        string problem
    LibraryInfo c_load_library "baton::load_library"(const string &path) nogil

cdef extern from "context.hpp" namespace "baton":
    cdef cppclass CContext "baton::Context":
        CContext(const vector[pair[string, string]] &options, int device) except +raise_failure nogil
        @staticmethod
        int count()

cdef extern from "cuda.hpp" namespace "baton":
    string cuda_export(uint64_t address) except +raise_failure

cdef extern from "memory.hpp" namespace "baton":
    cdef cppclass CMemory "baton::Memory":
        @staticmethod
        shared_ptr[CMemory] allocate_shared(shared_ptr[CContext] context, size_t num_bytes) except +raise_failure nogil
        @staticmethod
        shared_ptr[CMemory] allocate_private(size_t num_bytes) except +raise_failure nogil
        @staticmethod
        shared_ptr[CMemory] allocate_device(int device, size_t num_bytes) except +raise_failure nogil
        @staticmethod
        shared_ptr[CMemory] adopt(shared_ptr[CContext] context, uint64_t address, size_t num_bytes) except +raise_failure nogil
        @staticmethod
        shared_ptr[CMemory] also_in(shared_ptr[CContext] context, shared_ptr[CMemory] memory) except +raise_failure nogil
        uint64_t address()
        size_t num_bytes()
        int type()
        string pack_key() except +raise_failure

cdef extern from "doorbell.hpp" namespace "baton":
    cdef struct CBell "baton::Bell":
        pass
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
    cdef struct CWritePart "baton::WritePart":
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
        vector[CWritePart] parts() nogil
        int error_status()
        const string &error_text()

cdef extern from "connection.hpp" namespace "baton":
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

cdef extern from "path.hpp" namespace "baton":
    ctypedef enum CPathKind "baton::PathKind":
        pass

cdef extern from "link.hpp" namespace "baton":
    ctypedef enum CLinkState "baton::LinkState":
        pass
    cdef cppclass CLink "baton::Link":
        CLink(shared_ptr[CQueue] queue, CLinkParams params) except +raise_failure nogil
        void connect(int64_t timeout_ns) except +raise_failure nogil
        shared_ptr[CWrite] begin(uint64_t write_id, uint64_t room) nogil
        double probe(shared_ptr[CMemory] local, int64_t num_bytes, cbool is_write, int64_t timeout_ns) except +raise_failure nogil
        void lose(const string &why) nogil
        void close() nogil
        CLinkState state()
        const string &transports()
        const string &info()
        CPathKind path_kind()
        string failure_text()

cdef extern from "queue.hpp" namespace "baton":
    cdef cppclass CQueue "baton::Queue":
        CQueue(const shared_ptr[CContext] &context, int device, shared_ptr[CNotices] notices, int spin_us) except +raise_failure nogil
        void stop() nogil
        int num_links()

cdef extern from "inbox.hpp" namespace "baton":
    cdef struct CInboxCounters "baton::InboxCounters":
        uint64_t num_rung
        uint64_t num_stale
        uint64_t num_invalid
        uint64_t num_found_by_backstop
    cdef struct CNetworkWay "baton::NetworkWay":
        shared_ptr[CMemory] pool
        shared_ptr[CMemory] scratch
        shared_ptr[CMemory] bell
    cdef cppclass CInbox "baton::Inbox":
        const CMemory &table()
        const string &shared_address()
        const string &network_address()
        const string &network_table_key()
        int arm(uint64_t room, uint32_t generation)
        cbool disarm(uint32_t slot)
        cbool has_armed()
        vector[Record] poll()
        CInboxCounters counters()
        cbool list_links(vector[uint64_t] &links) nogil
        string link_info(uint64_t link) except +raise_failure nogil
        cbool has_no_writers()

cdef extern from "receiver.hpp" namespace "baton":
    cdef cppclass CReceiver "baton::Receiver":
        CReceiver(shared_ptr[CMemory] bell, int device, shared_ptr[CNotices] notices, cbool has_network, cbool shared) except +raise_failure
        shared_ptr[CInbox] open_inbox(uint64_t id, uint64_t nonce, uint32_t num_doorbells, const shared_ptr[CContext] &shared,
                                      const CNetworkWay &network) except +raise_failure nogil
        void armed() nogil
        void shut(const shared_ptr[CInbox] &inbox) nogil
        void forget(const shared_ptr[CInbox] &inbox) nogil
        void stop() nogil
