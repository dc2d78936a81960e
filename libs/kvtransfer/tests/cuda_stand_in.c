// Stands in for libcuda.so.1 where there is no GPU: "device memory" is this process's, a launch of the scatter kernel and the copies beside it are a
// loop that runs when its event is asked for the second time (so that launches are in flight for a while), an event of the caller is an int that is 1 when it has fired and 2
// when asking for it is an error. What a test may set: stand_in_hold (launches stay in flight), stand_in_fail_record, stand_in_fail_launch (one fails).
// As the driver does, it refuses a thread that has bound no context, and counts those that have and calls that were refused.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int R;
struct ipc { char bytes[64]; };
struct copied { uint64_t to, from, num_bytes; };
struct launch { int64_t *tiles; uint32_t count; char *source, *destination; struct copied copies[64]; int num_copies; };
struct event { int32_t fired; int32_t asked; struct launch pending; };
static struct launch last;
static int has_last;
int stand_in_bound_threads, stand_in_unbound_calls;
int stand_in_launches, stand_in_copies, stand_in_hold, stand_in_fail_record, stand_in_fail_launch;

static __thread int is_bound;
#define NEEDS_CONTEXT                                                    \
    if (!is_bound) {                                                     \
        __atomic_fetch_add(&stand_in_unbound_calls, 1, __ATOMIC_RELAXED); \
        return 201; /* CUDA_ERROR_INVALID_CONTEXT */                     \
    }

static void copy(const struct launch *launch) {
    for (int i = 0; i < launch->num_copies; ++i) {
        memcpy((void *)launch->copies[i].to, (void *)launch->copies[i].from, launch->copies[i].num_bytes);
    }
    for (uint32_t i = 0; i < launch->count; ++i) {
        int64_t *tile = launch->tiles + 3 * i;
        memcpy(launch->destination + tile[1], launch->source + tile[0], tile[2]);
    }
}

R cuInit(unsigned f) { return 0; }
R cuDeviceGet(int *d, int n) { *d = n; return n == 0 ? 0 : 101; }
R cuDevicePrimaryCtxRetain(void **c, int d) { *c = &last; return 0; }
R cuCtxSetCurrent(void *c) {
    if (!is_bound) {
        __atomic_fetch_add(&stand_in_bound_threads, 1, __ATOMIC_RELAXED);
    }
    is_bound = 1;
    return 0;
}
R cuGetErrorName(R r, const char **n) { *n = "STAND_IN_ERROR"; return 0; }
R cuMemcpyHtoD_v2(uint64_t d, const void *s, size_t n) { NEEDS_CONTEXT memcpy((void *)d, s, n); return 0; }
R cuMemcpyDtoDAsync_v2(uint64_t d, uint64_t s, size_t n, void *q) {
    NEEDS_CONTEXT
    if (last.num_copies == 64) {
        return 2;
    }
    last.copies[last.num_copies++] = (struct copied){d, s, n};
    has_last = 1;
    ++stand_in_copies;
    return 0;
}
R cuMemcpyHtoDAsync_v2(uint64_t d, const void *s, size_t n, void *q) { NEEDS_CONTEXT memcpy((void *)d, s, n); return 0; }
R cuMemAlloc_v2(uint64_t *p, size_t n) { NEEDS_CONTEXT *p = (uint64_t)aligned_alloc(4096, (n + 4095) & ~4095ul); return *p ? 0 : 2; }
R cuMemFree_v2(uint64_t p) { free((void *)p); return 0; }
R cuMemHostAlloc(void **p, size_t n, unsigned f) { NEEDS_CONTEXT *p = aligned_alloc(4096, (n + 4095) & ~4095ul); return 0; }
R cuMemFreeHost(void *p) { free(p); return 0; }
// what was not allocated here looks as if its allocation began a little before
R cuMemGetAddressRange_v2(uint64_t *b, size_t *n, uint64_t p) { *b = p % 4096 ? p - 512 : p; *n = 0; return 0; }
R cuIpcGetMemHandle(struct ipc *h, uint64_t p) { memcpy(h->bytes, &p, sizeof(p)); return 0; }
R cuIpcOpenMemHandle_v2(uint64_t *p, struct ipc h, unsigned f) { NEEDS_CONTEXT memcpy(p, h.bytes, sizeof(*p)); return 0; }
R cuIpcCloseMemHandle(uint64_t p) { return 0; }
R cuStreamCreate(void **s, unsigned f) { NEEDS_CONTEXT *s = &last; return 0; }
R cuStreamSynchronize(void *s) {
    if (has_last) { // one that no event stands for
        copy(&last);
        memset(&last, 0, sizeof(last));
        has_last = 0;
    }
    return 0;
}
R cuStreamDestroy_v2(void *s) { return 0; }
R cuEventCreate(void **e, unsigned f) { NEEDS_CONTEXT *e = calloc(1, sizeof(struct event)); return 0; }
R cuEventDestroy_v2(void *e) { free(e); return 0; }
R cuModuleLoadData(void **m, const void *ptx) { *m = &last; return strstr(ptx, ".entry scatter(") ? 0 : 218; }
R cuModuleUnload(void *m) { return 0; }
R cuModuleGetFunction(void **f, void *m, const char *n) { *f = &last; return strcmp(n, "scatter") ? 500 : 0; }

R cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh, void *s, void **p, void **x) {
    NEEDS_CONTEXT
    if (stand_in_fail_launch) {
        stand_in_fail_launch = 0;
        return 719; // CUDA_ERROR_LAUNCH_FAILED
    }
    last.tiles = (int64_t *)*(uint64_t *)p[0];
    last.count = *(uint32_t *)p[1];
    last.source = (char *)*(uint64_t *)p[2];
    last.destination = (char *)*(uint64_t *)p[3];
    has_last = 1;
    ++stand_in_launches;
    return 0;
}

R cuEventRecord(void *e, void *s) {
    NEEDS_CONTEXT
    struct event *event = e;
    if (stand_in_fail_record || !has_last) {
        stand_in_fail_record = 0;
        return 400;
    }
    event->fired = event->asked = 0;
    event->pending = last;
    memset(&last, 0, sizeof(last));
    has_last = 0;
    return 0;
}

R cuEventQuery(void *e) {
    NEEDS_CONTEXT
    struct event *event = e;
    if (!event) {
        return 400; // CUDA_ERROR_INVALID_HANDLE
    }
    if (!event->pending.tiles && !event->pending.num_copies) {
        int32_t fired = __atomic_load_n(&event->fired, __ATOMIC_ACQUIRE);
        return fired == 0 ? 600 : fired == 1 ? 0 : 719;
    }
    if (__atomic_load_n(&stand_in_hold, __ATOMIC_ACQUIRE) || event->asked++ < 1) {
        return 600;
    }
    if (!event->fired) {
        copy(&event->pending);
        event->fired = 1;
    }
    return 0;
}
