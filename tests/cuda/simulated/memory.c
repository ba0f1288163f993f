// Device memory, from cuMemAlloc, from the stream-ordered pool or from mapped chunks, and pinned host memory.
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulated.h"

// Added to host addresses, so that code on the host that dereferences a device address crashes.
#define BIAS 0x400000000000ULL
#define POOL_BLOCK ((size_t)32 << 20)
#define CHUNK ((size_t)2 << 20)

// Allocated ranges, sorted by address.
struct ranges {
    struct range {
        uintptr_t start;
        size_t bytes;
        int device;
        // DIRECT: from cuMemAlloc. POOLED: from cuMemAllocAsync. CLOSED: mapped by cuMemMap, but not accessible yet. MAPPED: mapped and
        // accessible. OPENED: an allocation of another process. In `pinned_ranges`, MAPPED is memory that cuMemHostRegister pinned, and
        // DIRECT is memory from cuMemHostAlloc. In `reservations`, every kind is DIRECT.
        enum { DIRECT, POOLED, CLOSED, MAPPED, OPENED } kind;
        struct chunk *chunk;
        int file; // the file behind a direct allocation, which other processes can map
        atomic_int *users; // how many other processes map the file
    } *items;
    size_t count, capacity;
};
static struct ranges device_ranges, pinned_ranges, reservations;
// The lowest start and the highest end, as host addresses, of all ranges of device memory or of reserved addresses so far, including those
// that were freed since.
static uintptr_t lowest = UINTPTR_MAX, highest;
// Bytes of each device that are allocated outside its pool.
static size_t taken[MAX_DEVICES];

static struct CUmemPoolHandle_st {
    cuuint64_t used, reserved;
} pools[MAX_DEVICES];

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// The number of ranges that start at or before an address.
static size_t place(const struct ranges *ranges, uintptr_t address) {
    size_t low = 0, high = ranges->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges->items[middle].start <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static struct range *find(const struct ranges *ranges, uintptr_t address) {
    size_t i = place(ranges, address);
    if (i == 0) return NULL;
    struct range *range = &ranges->items[i - 1];
    return address - range->start < range->bytes ? range : NULL;
}

static void insert(struct ranges *ranges, struct range range) {
    if (ranges->count == ranges->capacity) {
        ranges->capacity = ranges->capacity ? 2 * ranges->capacity : 256;
        ranges->items = realloc(ranges->items, ranges->capacity * sizeof range);
        if (!ranges->items) abort();
    }
    size_t i = place(ranges, range.start);
    memmove(&ranges->items[i + 1], &ranges->items[i], (ranges->count - i) * sizeof range);
    ranges->items[i] = range;
    ranges->count++;
    if (ranges == &pinned_ranges) return;
    if (range.start < lowest) lowest = range.start;
    if (range.start + range.bytes > highest) highest = range.start + range.bytes;
}

static void take_out(struct ranges *ranges, struct range *range) {
    size_t i = range - ranges->items;
    memmove(range, range + 1, (--ranges->count - i) * sizeof *range);
}

static bool covers(const struct ranges *ranges, uintptr_t address, size_t bytes) {
    while (bytes) {
        struct range *range = find(ranges, address);
        if (!range || range->kind == CLOSED) return false;
        size_t rest = range->start + range->bytes - address;
        if (rest >= bytes) return true;
        if (range->kind != MAPPED) return false; // an access must not run from one allocation into the next
        address += rest;
        bytes -= rest;
    }
    return true;
}

bool simulated_is_device(CUdeviceptr address) { return address >= BIAS; }

bool simulated_looks_like_device(CUdeviceptr value) {
    return simulated_is_device(value) && value - BIAS >= lowest && value - BIAS < highest;
}

unsigned char *simulated_host(CUdeviceptr address) { return (unsigned char *)(uintptr_t)(address - BIAS); }

bool simulated_covers(CUdeviceptr address, size_t bytes) {
    return bytes == 0 || (simulated_is_device(address) && covers(&device_ranges, address - BIAS, bytes));
}

int simulated_owner(CUdeviceptr address) {
    const struct range *range = simulated_is_device(address) ? find(&device_ranges, address - BIAS) : NULL;
    return range ? range->device : -1;
}

bool simulated_pinned(const void *address, size_t bytes) { return covers(&pinned_ranges, (uintptr_t)address, bytes); }

static size_t reserved(int device) { return taken[device] + pools[device].reserved; }

static uintptr_t map(size_t bytes, int protection) {
    void *start = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? 0 : (uintptr_t)start;
}

// The last page of a file counts the other processes that map the file.
#define PAGE ((size_t)4096)
static atomic_int *count_of(int file, size_t bytes) {
    void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)bytes);
    return page == MAP_FAILED ? NULL : page;
}

// Map the memory of a file, which other processes can map, too. Returns 0 if this fails.
static uintptr_t map_shared(int file, size_t bytes) {
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    return start == MAP_FAILED ? 0 : (uintptr_t)start;
}

// Whether the device has this many free bytes. Bytes that the pool has reserved are not free, even if no allocation uses them.
static bool fits(int device, size_t bytes) { return bytes <= simulated_total_memory() - reserved(device); }

static CUresult allocate(CUdeviceptr *address, size_t bytes, bool pooled) {
    int device = simulated_context->device;
    CUmemoryPool pool = &pools[device];
    if (!bytes && !pooled) return simulated_fail("cuMemAlloc", CUDA_ERROR_INVALID_VALUE, "no-bytes");
    *address = 0;
    if (!bytes) return CUDA_SUCCESS;
    size_t size = round_up(bytes, pooled ? 512 : PAGE);
    if (!pooled && !fits(device, size)) return simulated_fail("cuMemAlloc", CUDA_ERROR_OUT_OF_MEMORY, "full");
    if (pooled && pool->used + size > pool->reserved) {
        size_t more = round_up(pool->used + size - pool->reserved, POOL_BLOCK);
        if (!fits(device, more)) return simulated_fail("cuMemAllocAsync", CUDA_ERROR_OUT_OF_MEMORY, "full");
        pool->reserved += more;
        simulated_log("grow bytes=%zu", more);
    }
    int file = pooled ? -1 : memfd_create("simulated-direct", MFD_CLOEXEC);
    if (!pooled && (file < 0 || ftruncate(file, (off_t)(size + PAGE))))
        return simulated_fail("cuMemAlloc", CUDA_ERROR_OUT_OF_MEMORY, "the-machine's-memory-is-full");
    uintptr_t start = pooled ? map(size, PROT_READ | PROT_WRITE) : map_shared(file, size);
    if (!start) return simulated_fail("any", CUDA_ERROR_OUT_OF_MEMORY, "the-machine's-memory-is-full");
    atomic_int *users = pooled ? NULL : count_of(file, size);
    insert(&device_ranges, (struct range){start, size, device, pooled ? POOLED : DIRECT, NULL, file, users});
    if (pooled) pool->used += size;
    else taken[device] += size;
    *address = start + BIAS;
    return CUDA_SUCCESS;
}

static CUresult release(const char *call, CUdeviceptr address) {
    struct range *range = simulated_is_device(address) ? find(&device_ranges, address - BIAS) : NULL;
    bool allocated = range && (range->kind == DIRECT || range->kind == POOLED);
    if (!allocated || range->start != address - BIAS)
        return simulated_fail(call, CUDA_ERROR_INVALID_VALUE, "not-an-allocation");
    if (range->users && atomic_load(range->users)) return simulated_fail(call, CUDA_ERROR_INVALID_VALUE, "another-process-maps-it");
    if (range->kind == POOLED) pools[range->device].used -= range->bytes;
    else taken[range->device] -= range->bytes;
    if (range->users) munmap((void *)range->users, PAGE), close(range->file);
    munmap((void *)range->start, range->bytes);
    take_out(&device_ranges, range);
    return CUDA_SUCCESS;
}

static CUresult alloc(CUdeviceptr *address, size_t bytes) {
    TRY(simulated_ready(true));
    TRY(simulated_unsafe("cuMemAlloc"));
    TRY(allocate(address, bytes, false));
    simulated_log("alloc bytes=%zu", bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) { LOCKED(alloc(address, bytes)); }

static CUresult free_direct(CUdeviceptr address) {
    TRY(simulated_ready(true));
    TRY(simulated_unsafe("cuMemFree"));
    simulated_log("free");
    return address ? release("cuMemFree", address) : CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) { LOCKED(free_direct(address)); }

static CUresult alloc_async(CUdeviceptr *address, size_t bytes, CUstream stream) {
    TRY(simulated_stream("cuMemAllocAsync", stream));
    TRY(allocate(address, bytes, true));
    simulated_log("alloc-async bytes=%zu captured=%d", bytes, simulated_capturing(stream));
    simulated_queue(stream, (struct CUgraphNode_st){.kind = ALLOCATE});
    return CUDA_SUCCESS;
}
CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream) { LOCKED(alloc_async(address, bytes, stream)); }

static CUresult free_async(CUdeviceptr address, CUstream stream) {
    TRY(simulated_stream("cuMemFreeAsync", stream));
    simulated_log("free-async captured=%d", simulated_capturing(stream));
    simulated_queue(stream, (struct CUgraphNode_st){.kind = FREE});
    // A graph writes to this memory at each launch, so a captured call does not release it.
    return simulated_capturing(stream) || !address ? CUDA_SUCCESS : release("cuMemFreeAsync", address);
}
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) { LOCKED(free_async(address, stream)); }

CUresult cuMemGetInfo(size_t *free, size_t *total) {
    TRY(simulated_ready(true));
    *total = simulated_total_memory();
    *free = *total - reserved(simulated_context->device);
    return CUDA_SUCCESS;
}

// The chunks of cuMemCreate are in one memory file, each at an offset of its own. A chunk is freed when its handle is released and no range
// maps the chunk.
struct chunk {
    size_t offset, bytes;
    int device;
    int references; // the handle, until it is released, and the ranges that map the chunk
};
static int chunks_file = -1;
static size_t chunks_end;

static void drop(struct chunk *chunk) {
    if (--chunk->references) return;
    fallocate(chunks_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)chunk->offset, (off_t)chunk->bytes);
    taken[chunk->device] -= chunk->bytes;
    simulated_log("shrink bytes=%zu", chunk->bytes);
    free(chunk);
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
    (void)prop, (void)option;
    *bytes = CHUNK;
    return CUDA_SUCCESS;
}

static CUresult address_reserve(CUdeviceptr *address, size_t bytes, size_t alignment, unsigned long long flags) {
    TRY(simulated_ready(false));
    if (!bytes || bytes % CHUNK || alignment > CHUNK || flags)
        return simulated_fail("cuMemAddressReserve", CUDA_ERROR_INVALID_VALUE, "arguments");
    // The additional bytes let the range start at a multiple of CHUNK. Those outside of the range stay mapped.
    uintptr_t start = map(bytes + CHUNK, PROT_NONE);
    if (!start) return simulated_fail("cuMemAddressReserve", CUDA_ERROR_OUT_OF_MEMORY, "addresses");
    start = round_up(start, CHUNK);
    insert(&reservations, (struct range){.start = start, .bytes = bytes});
    *address = start + BIAS;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    (void)hint;
    LOCKED(address_reserve(address, bytes, alignment, flags));
}

// The first mapping that starts within a range of addresses, or NULL.
static struct range *mapping_in(uintptr_t start, size_t bytes) {
    size_t i = start ? place(&device_ranges, start - 1) : 0;
    struct range *range = &device_ranges.items[i];
    return i < device_ranges.count && range->start < start + bytes ? range : NULL;
}

static CUresult address_free(CUdeviceptr address, size_t bytes) {
    struct range *range = find(&reservations, address - BIAS);
    if (!range || range->start != address - BIAS || range->bytes != bytes || mapping_in(range->start, bytes))
        return simulated_fail("cuMemAddressFree", CUDA_ERROR_INVALID_VALUE, "not-an-unmapped-reservation");
    munmap((void *)range->start, bytes);
    take_out(&reservations, range);
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { LOCKED(address_free(address, bytes)); }

static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop) {
    TRY(simulated_ready(false));
    TRY(simulated_unsafe("cuMemCreate"));
    bool known = prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (!known || !bytes || bytes % CHUNK || prop->location.id < 0 || prop->location.id >= MAX_DEVICES)
        return simulated_fail("cuMemCreate", CUDA_ERROR_INVALID_VALUE, "arguments");
    int device = prop->location.id;
    if (!fits(device, bytes)) return simulated_fail("cuMemCreate", CUDA_ERROR_OUT_OF_MEMORY, "full");
    if (chunks_file < 0) chunks_file = memfd_create("simulated", MFD_CLOEXEC);
    if (chunks_file < 0 || ftruncate(chunks_file, (off_t)(chunks_end + bytes)))
        return simulated_fail("cuMemCreate", CUDA_ERROR_OUT_OF_MEMORY, "the-machine's-memory-is-full");
    struct chunk *chunk = malloc(sizeof *chunk);
    if (!chunk) abort();
    *chunk = (struct chunk){chunks_end, bytes, device, 1};
    chunks_end += bytes;
    taken[device] += bytes;
    *handle = (uintptr_t)chunk;
    simulated_log("grow bytes=%zu", bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags) {
    (void)flags;
    LOCKED(create(handle, bytes, prop));
}

static CUresult release_chunk(CUmemGenericAllocationHandle handle) {
    TRY(simulated_unsafe("cuMemRelease"));
    drop((struct chunk *)(uintptr_t)handle);
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { LOCKED(release_chunk(handle)); }

static CUresult map_chunk(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle) {
    TRY(simulated_unsafe("cuMemMap"));
    struct chunk *chunk = (struct chunk *)(uintptr_t)handle;
    uintptr_t start = address - BIAS;
    bool whole_chunk = chunk && offset == 0 && bytes == chunk->bytes && address % CHUNK == 0;
    if (!whole_chunk || !covers(&reservations, start, bytes) || mapping_in(start, bytes) || find(&device_ranges, start))
        return simulated_fail("cuMemMap", CUDA_ERROR_INVALID_VALUE, "arguments");
    if (mmap((void *)start, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, chunks_file, (off_t)chunk->offset) == MAP_FAILED)
        return simulated_fail("cuMemMap", CUDA_ERROR_OUT_OF_MEMORY, "the-machine's-memory-is-full");
    insert(&device_ranges, (struct range){start, bytes, chunk->device, CLOSED, chunk, -1, NULL});
    chunk->references++;
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    (void)flags;
    LOCKED(map_chunk(address, bytes, offset, handle));
}

// Whether a range consists of whole mappings.
static bool whole_mappings(uintptr_t start, size_t bytes) {
    for (uintptr_t at = start; at < start + bytes;) {
        struct range *range = find(&device_ranges, at);
        if (!range || range->start != at || (range->kind != CLOSED && range->kind != MAPPED) || range->bytes > start + bytes - at) return false;
        at += range->bytes;
    }
    return bytes != 0;
}

static CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    uintptr_t start = address - BIAS;
    bool read_and_write = count == 1 && access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!read_and_write || !whole_mappings(start, bytes)) return simulated_fail("cuMemSetAccess", CUDA_ERROR_INVALID_VALUE, "arguments");
    mprotect((void *)start, bytes, PROT_READ | PROT_WRITE);
    for (uintptr_t at = start; at < start + bytes;) {
        struct range *range = find(&device_ranges, at);
        range->kind = MAPPED;
        at += range->bytes;
    }
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    LOCKED(set_access(address, bytes, access, count));
}

static CUresult unmap(CUdeviceptr address, size_t bytes) {
    TRY(simulated_unsafe("cuMemUnmap"));
    uintptr_t start = address - BIAS;
    if (!whole_mappings(start, bytes)) return simulated_fail("cuMemUnmap", CUDA_ERROR_INVALID_VALUE, "not-whole-mappings");
    mmap((void *)start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (uintptr_t at = start; at < start + bytes;) {
        struct range *range = find(&device_ranges, at);
        at += range->bytes;
        struct chunk *chunk = range->chunk;
        take_out(&device_ranges, range);
        drop(chunk);
    }
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) { LOCKED(unmap(address, bytes)); }

bool simulated_find_direct(CUdeviceptr address, struct simulated_direct *found) {
    const struct range *range = simulated_is_device(address) ? find(&device_ranges, address - BIAS) : NULL;
    if (!range || range->kind != DIRECT || range->start != address - BIAS) return false;
    *found = (struct simulated_direct){range->file, range->device, range->bytes};
    return true;
}

CUdeviceptr simulated_map_direct(struct simulated_direct of) {
    uintptr_t start = map_shared(of.file, of.bytes);
    atomic_int *users = count_of(of.file, of.bytes);
    if (!start || !users) return 0;
    atomic_fetch_add(users, 1);
    insert(&device_ranges, (struct range){start, of.bytes, of.device, OPENED, NULL, -1, users});
    return start + BIAS;
}

bool simulated_unmap_direct(CUdeviceptr address) {
    struct range *range = simulated_is_device(address) ? find(&device_ranges, address - BIAS) : NULL;
    if (!range || range->kind != OPENED || range->start != address - BIAS) return false;
    atomic_fetch_sub(range->users, 1);
    munmap((void *)range->users, PAGE);
    munmap((void *)range->start, range->bytes);
    take_out(&device_ranges, range);
    return true;
}

static size_t pinned_bytes;

static CUresult host_alloc(void **address, size_t bytes) {
    TRY(simulated_ready(true));
    TRY(simulated_unsafe("cuMemHostAlloc"));
    const char *limit = getenv("SIMULATED_CUDA_PINNED");
    if (limit && pinned_bytes + bytes > strtoull(limit, NULL, 10))
        return simulated_fail("cuMemHostAlloc", CUDA_ERROR_OUT_OF_MEMORY, "pinned-memory");
    uintptr_t start = bytes ? map(round_up(bytes, 4096), PROT_READ | PROT_WRITE) : 0;
    if (!start) return simulated_fail("cuMemHostAlloc", bytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE, "size");
    insert(&pinned_ranges, (struct range){.start = start, .bytes = bytes});
    pinned_bytes += bytes;
    simulated_log("alloc-pinned bytes=%zu", bytes);
    *address = (void *)start;
    return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    (void)flags;
    LOCKED(host_alloc(address, bytes));
}
CUresult cuMemAllocHost(void **address, size_t bytes) { LOCKED(host_alloc(address, bytes)); }

static CUresult host_free(void *address) {
    TRY(simulated_unsafe("cuMemFreeHost"));
    struct range *range = find(&pinned_ranges, (uintptr_t)address);
    if (!range || range->start != (uintptr_t)address || range->kind == MAPPED)
        return simulated_fail("cuMemFreeHost", CUDA_ERROR_INVALID_VALUE, "address");
    munmap(address, round_up(range->bytes, 4096));
    pinned_bytes -= range->bytes;
    simulated_log("free-pinned bytes=%zu", range->bytes);
    take_out(&pinned_ranges, range);
    return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void *address) { LOCKED(host_free(address)); }

// Pin memory that the process has allocated itself, such as memory that it shares with other processes. The driver never frees this memory.
static CUresult host_register(void *address, size_t bytes, unsigned flags) {
    TRY(simulated_ready(true));
    TRY(simulated_unsafe("cuMemHostRegister"));
    bool whole_pages = bytes && (uintptr_t)address % 4096 == 0 && bytes % 4096 == 0;
    if (!whole_pages || flags & ~(unsigned)CU_MEMHOSTREGISTER_PORTABLE || find(&pinned_ranges, (uintptr_t)address))
        return simulated_fail("cuMemHostRegister", CUDA_ERROR_INVALID_VALUE, "arguments");
    const char *status = getenv("SIMULATED_CUDA_REGISTER");
    if (status) return simulated_fail("cuMemHostRegister", (CUresult)atoi(status), "registration");
    const char *limit = getenv("SIMULATED_CUDA_PINNED");
    if (limit && pinned_bytes + bytes > strtoull(limit, NULL, 10))
        return simulated_fail("cuMemHostRegister", CUDA_ERROR_OUT_OF_MEMORY, "pinned-memory");
    insert(&pinned_ranges, (struct range){.start = (uintptr_t)address, .bytes = bytes, .kind = MAPPED});
    pinned_bytes += bytes;
    simulated_log("register bytes=%zu", bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemHostRegister(void *address, size_t bytes, unsigned flags) { LOCKED(host_register(address, bytes, flags)); }

static CUresult host_unregister(void *address) {
    TRY(simulated_unsafe("cuMemHostUnregister"));
    struct range *range = find(&pinned_ranges, (uintptr_t)address);
    if (!range || range->start != (uintptr_t)address || range->kind != MAPPED)
        return simulated_fail("cuMemHostUnregister", CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "address");
    pinned_bytes -= range->bytes;
    simulated_log("unregister bytes=%zu", range->bytes);
    take_out(&pinned_ranges, range);
    return CUDA_SUCCESS;
}
CUresult cuMemHostUnregister(void *address) { LOCKED(host_unregister(address)); }

static CUresult pointer_attribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    TRY(simulated_ready(false));
    const struct range *range = simulated_is_device(address) ? find(&device_ranges, address - BIAS) : NULL;
    const struct range *pinned = find(&pinned_ranges, (uintptr_t)address);
    if (!range && !pinned) return CUDA_ERROR_INVALID_VALUE;
    if (!range) range = pinned;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = range == pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = range->device; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = address; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT: return cuDevicePrimaryCtxRetain(data, range->device);
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    LOCKED(pointer_attribute(data, attribute, address));
}
