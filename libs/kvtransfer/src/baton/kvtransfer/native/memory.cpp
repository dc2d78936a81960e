#include "memory.hpp"

#include "cuda.hpp"
#include "failure.hpp"
#include "shared_mapping.hpp"

#include <sys/mman.h>

namespace baton {

MemoryPtr Memory::allocate(ContextPtr context, size_t num_bytes, bool shared) {
    if (shared) {
        MemoryPtr memory(new Memory(std::move(context), nullptr, num_bytes, UCP_MEM_MAP_ALLOCATE, Owner::SOMEBODY));
        if (find_shared(memory->address()).kind.empty()) { // UCX takes private memory then, without a word in its status
            throw Failure("ucp_mem_map", UCS_ERR_NO_MEMORY,
                          "no shared memory of " + std::to_string(num_bytes) +
                              " bytes is left: raise the kernel's limits (ipcs -l: kernel.shmmax, shmall, shmmni), or use transport 'tcp'");
        }
        return memory;
    }
    // Not left to UCX, which may take it from the heap: this must be zeroed, and touched by nobody before its first use.
    void *address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
        fail_errno("mmap");
    }
    return MemoryPtr(new Memory(std::move(context), address, num_bytes, 0, Owner::US_MMAP));
}

MemoryPtr Memory::allocate_device(ContextPtr context, size_t num_bytes) {
    void *address = reinterpret_cast<void *>(cuda_allocate(context->device(), num_bytes));
    return MemoryPtr(new Memory(std::move(context), address, num_bytes, 0, Owner::US_CUDA));
}

MemoryPtr Memory::adopt(ContextPtr context, uint64_t address, size_t num_bytes) {
    return MemoryPtr(new Memory(std::move(context), reinterpret_cast<void *>(address), num_bytes, 0, Owner::SOMEBODY));
}

Memory::Memory(ContextPtr context, void *address, size_t num_bytes, unsigned flags, Owner owner)
    : context_(std::move(context)), address_(address), num_bytes_(num_bytes), owner_(owner) {
    if (context_->device() >= 0) {
        cuda_bind(context_->device());
    }
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
    params.address = address;
    params.length = num_bytes;
    params.flags = flags;
    if (flags & UCP_MEM_MAP_ALLOCATE) {
        params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
        params.memory_type = UCS_MEMORY_TYPE_HOST;
    }
    ucs_status_t status = ucp().ucp_mem_map(context_->handle(), &params, &handle_);
    if (status != UCS_OK) {
        give_back();
        check("ucp_mem_map", status);
    }
    ucp_mem_attr_t attributes{};
    attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_MEM_TYPE;
    if (ucp().ucp_mem_query(handle_, &attributes) == UCS_OK) {
        address_ = attributes.address;
        type_ = attributes.mem_type;
    }
}

Memory::~Memory() {
    ucp().ucp_mem_unmap(context_->handle(), handle_);
    give_back();
}

void Memory::give_back() {
    if (owner_ == Owner::US_MMAP) {
        munmap(address_, num_bytes_);
    } else if (owner_ == Owner::US_CUDA) {
        cuda_free(context_->device(), address());
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
