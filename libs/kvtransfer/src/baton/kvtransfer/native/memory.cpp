#include "memory.hpp"

#include "cuda.hpp"
#include "failure.hpp"
#include "shared_mapping.hpp"

#include <cerrno>
#include <cstring>
#include <sys/mman.h>

namespace baton {

MemoryPtr Memory::allocate_shared(ContextPtr context, size_t num_bytes) {
    MemoryPtr memory(new Memory(nullptr, num_bytes, Owner::SOMEBODY));
    try {
        memory->enter(std::move(context), UCP_MEM_MAP_ALLOCATE);
    } catch (const Failure &failure) {
        if (failure.status() != UCS_ERR_NO_MEMORY) {
            throw;
        }
    }
    if (find_shared(memory->address()).kind.empty()) { // UCX may have taken private memory, without a word in its status
        throw Failure("ucp_mem_map", UCS_ERR_NO_MEMORY,
                      "no shared memory of " + std::to_string(num_bytes) +
                          " bytes is left: raise the kernel's limits (ipcs -l: kernel.shmmax, shmall, shmmni), or use transport 'tcp'");
    }
    return memory;
}

MemoryPtr Memory::allocate_private(size_t num_bytes) {
    // Not left to UCX, which may take it from the heap: this must be zeroed, and touched by nobody before its first use.
    void *address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
        throw Failure("mmap", -errno, std::string(std::strerror(errno)) + ": " + std::to_string(num_bytes) + " bytes were asked for");
    }
    // Pages of 4 KiB lie wherever there is room: of the same copies, a fifth more or less speed from one process to the next. No harm where it cannot be.
    madvise(address, num_bytes, MADV_HUGEPAGE);
    return MemoryPtr(new Memory(address, num_bytes, Owner::US_MMAP));
}

MemoryPtr Memory::allocate_device(int device, size_t num_bytes) {
    return MemoryPtr(new Memory(reinterpret_cast<void *>(cuda_allocate(device, num_bytes)), num_bytes, Owner::US_CUDA, device));
}

MemoryPtr Memory::adopt(ContextPtr context, uint64_t address, size_t num_bytes) {
    MemoryPtr memory(new Memory(reinterpret_cast<void *>(address), num_bytes, Owner::SOMEBODY));
    memory->enter(std::move(context), 0);
    return memory;
}

MemoryPtr Memory::also_in(ContextPtr context, MemoryPtr memory) {
    MemoryPtr also = adopt(std::move(context), memory->address(), memory->num_bytes());
    also->base_ = std::move(memory);
    return also;
}

Memory::Memory(void *address, size_t num_bytes, Owner owner, int device) : address_(address), num_bytes_(num_bytes), owner_(owner), device_(device) {
    type_ = owner == Owner::US_CUDA ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
}

void Memory::enter(ContextPtr context, unsigned flags) {
    if (context->device() >= 0) {
        cuda_bind(context->device());
    }
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
    params.address = address_;
    params.length = num_bytes_;
    params.flags = flags;
    if (flags & UCP_MEM_MAP_ALLOCATE) {
        params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        params.memory_type = UCS_MEMORY_TYPE_HOST;
    }
    check("ucp_mem_map", ucp().ucp_mem_map(context->handle(), &params, &handle_));
    context_ = std::move(context);
    ucp_mem_attr_t attributes{};
    attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_MEM_TYPE;
    if (ucp().ucp_mem_query(handle_, &attributes) == UCS_OK) {
        address_ = attributes.address;
        type_ = attributes.mem_type;
    }
}

Memory::~Memory() {
    if (context_) {
        ucp().ucp_mem_unmap(context_->handle(), handle_);
    }
    if (owner_ == Owner::US_MMAP) {
        munmap(address_, num_bytes_);
    } else if (owner_ == Owner::US_CUDA) {
        cuda_free(device_, address());
    }
}

std::string Memory::pack_key() const {
    void *buffer = nullptr;
    size_t length = 0;
    check("ucp_rkey_pack", ucp().ucp_rkey_pack(context_->handle(), handle_, &buffer, &length));
    std::string key(static_cast<const char *>(buffer), length);
    ucp().ucp_rkey_buffer_release(buffer);
    return key;
}

} // namespace baton
