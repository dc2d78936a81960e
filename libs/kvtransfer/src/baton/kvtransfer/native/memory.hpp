// Registered memory: mapped into a context, with the packed key that lets others write into it.
#pragma once

#include "context.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace baton {

class Memory {
public:
    // Zeroed memory. shared: UCX allocates it so that other processes of the host can map it.
    static std::shared_ptr<Memory> allocate(ContextPtr context, size_t num_bytes, bool shared);
    // Memory of the context's CUDA device.
    static std::shared_ptr<Memory> allocate_device(ContextPtr context, size_t num_bytes);
    // Memory that the caller keeps alive.
    static std::shared_ptr<Memory> adopt(ContextPtr context, uint64_t address, size_t num_bytes);

    ~Memory();
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    uint64_t address() const { return reinterpret_cast<uint64_t>(address_); }
    size_t num_bytes() const { return num_bytes_; }
    ucp_mem_h handle() const { return handle_; }
    ucs_memory_type_t type() const { return type_; }
    const ContextPtr &context() const { return context_; }
    std::string pack_key() const;

private:
    enum class Owner { SOMEBODY, US_MMAP, US_CUDA };
    Memory(ContextPtr context, void *address, size_t num_bytes, unsigned flags, Owner owner);
    void give_back();

    ContextPtr context_;
    void *address_;
    size_t num_bytes_;
    Owner owner_;
    ucp_mem_h handle_ = nullptr;
    ucs_memory_type_t type_ = UCS_MEMORY_TYPE_HOST;
};

using MemoryPtr = std::shared_ptr<Memory>;

} // namespace baton
