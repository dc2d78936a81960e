// Memory that pages and doorbells lie in. Registered memory is mapped into a context, with the packed key that lets others write into it; the same bytes
// may be registered in several.
#pragma once

#include "context.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace baton {

class Memory {
public:
    // Zeroed memory that UCX allocates so that other processes of the host can map it; registered.
    static std::shared_ptr<Memory> allocate_shared(ContextPtr context, size_t num_bytes);
    // Zeroed memory of this process; not registered.
    static std::shared_ptr<Memory> allocate_private(size_t num_bytes);
    // Memory of a CUDA device; not registered.
    static std::shared_ptr<Memory> allocate_device(int device, size_t num_bytes);
    // Memory that the caller keeps alive; registered.
    static std::shared_ptr<Memory> adopt(ContextPtr context, uint64_t address, size_t num_bytes);
    // The bytes of `memory`, registered in (another) context; keeps `memory`.
    static std::shared_ptr<Memory> also_in(ContextPtr context, std::shared_ptr<Memory> memory);

    ~Memory();
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    uint64_t address() const { return reinterpret_cast<uint64_t>(address_); }
    size_t num_bytes() const { return num_bytes_; }
    ucp_mem_h handle() const { return handle_; }
    ucs_memory_type_t type() const { return type_; }
    // Null: not registered.
    const ContextPtr &context() const { return context_; }
    std::string pack_key() const;

private:
    enum class Owner { SOMEBODY, US_MMAP, US_CUDA };
    Memory(void *address, size_t num_bytes, Owner owner, int device = -1);
    void enter(ContextPtr context, unsigned flags);

    std::shared_ptr<Memory> base_; // whose bytes these are, where that is another Memory
    ContextPtr context_;
    void *address_;
    size_t num_bytes_;
    const Owner owner_;
    const int device_;
    ucp_mem_h handle_ = nullptr;
    ucs_memory_type_t type_ = UCS_MEMORY_TYPE_HOST;
};

using MemoryPtr = std::shared_ptr<Memory>;

} // namespace baton
