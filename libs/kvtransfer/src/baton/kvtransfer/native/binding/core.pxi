# The library, contexts, registered memory, and what native threads have to tell.

def load_library(path: str):
    """-> (path, version, names of missing functions, the loader's problem). The first usable library stays for the life of the process."""
    cdef LibraryInfo info
    cdef string encoded = path.encode()
    with nogil:
        info = c_load_library(encoded)
    return info.path.decode(), info.version.decode(), [name.decode() for name in info.missing], info.problem.decode()


BELL_BYTES = sizeof(CBell)


def num_contexts():
    """UCX contexts of this process that are alive."""
    return CContext.count()


cdef class Context:
    cdef Held[CContext] ptr

    def __init__(self, options: dict, int device):
        cdef vector[pair[string, string]] pairs
        for name, value in options.items():
            pairs.push_back(pair[string, string](name.encode(), value.encode()))
        cdef CContext *made
        with nogil:
            made = new CContext(pairs, device)
        self.ptr = Held[CContext](shared_ptr[CContext](made))


cdef class Memory:
    """Memory, registered or not. Its buffer keeps it alive: `release` only lets go of this object's own hold."""

    cdef Held[CMemory] ptr
    cdef readonly uint64_t address
    cdef readonly size_t num_bytes
    cdef readonly bint is_host

    def __init__(self):
        raise TypeError("use one of its static methods")

    @staticmethod
    def allocate_shared(Context context not None, size_t num_bytes):
        cdef shared_ptr[CMemory] ptr
        with nogil:
            ptr = CMemory.allocate_shared(context.ptr, num_bytes)
        return Memory._wrap(ptr)

    @staticmethod
    def allocate_private(size_t num_bytes):
        """Not registered, as is device memory: `also_in` does that."""
        cdef shared_ptr[CMemory] ptr
        with nogil:
            ptr = CMemory.allocate_private(num_bytes)
        return Memory._wrap(ptr)

    @staticmethod
    def allocate_device(int device, size_t num_bytes):
        cdef shared_ptr[CMemory] ptr
        with nogil:
            ptr = CMemory.allocate_device(device, num_bytes)
        return Memory._wrap(ptr)

    @staticmethod
    def adopt(Context context not None, uint64_t address, size_t num_bytes):
        cdef shared_ptr[CMemory] ptr
        with nogil:
            ptr = CMemory.adopt(context.ptr, address, num_bytes)
        return Memory._wrap(ptr)

    @staticmethod
    def also_in(Context context not None, Memory memory not None):
        cdef shared_ptr[CMemory] ptr
        with nogil:
            ptr = CMemory.also_in(context.ptr, memory.ptr)
        return Memory._wrap(ptr)

    @staticmethod
    cdef Memory _wrap(shared_ptr[CMemory] ptr):
        cdef Memory self = Memory.__new__(Memory)
        self.ptr = Held[CMemory](ptr)
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
    cdef Held[CNotices] ptr

    def __init__(self):
        self.ptr = Held[CNotices](make_shared[CNotices]())

    def wait(self):
        """Blocks without the GIL. -> [(kind, id), ...]; empty after close."""
        cdef vector[CNotice] taken
        with nogil:
            taken = self.ptr.get().wait()
        return [(<int>notice.kind, notice.id) for notice in taken]

    def close(self):
        self.ptr.get().close()
