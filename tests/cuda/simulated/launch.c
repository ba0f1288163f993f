// Modules, functions, launches and tensor maps.
//
// The table of kernels has a line for each function of each image: the CRC-32 of the module's bytes, the architecture (such as sm_90a, or
// compute_120 for PTX), the function's name, its number of registers per thread, the threads per block in its launch bounds (0: no launch
// bounds), its static shared memory in bytes, and the sizes of its parameters in bytes, separated by commas (-: no parameters). Without a
// table, a module has functions of every name.
#include <sys/uio.h>
#include <unistd.h>

#include "simulated.h"

#define MAX_PARAMETERS 64

struct kernel {
    uint32_t checksum; // of the module's bytes
    char architecture[16], name[200];
    unsigned registers, threads, shared, parameter_count;
    unsigned parameter_bytes[MAX_PARAMETERS];
};

struct CUmod_st {
    CUcontext context;
    // A module from PTX text has `text`. One from a fat binary has `checksum` and, if there is a table, `architecture`.
    const char *text;
    uint32_t checksum;
    char architecture[16];
};

struct CUfunc_st {
    CUmodule module;
    char name[200];
    const struct kernel *kernel;
    unsigned dynamic; // bytes of dynamic shared memory that a launch may ask for
};

static struct kernel *kernels;
static size_t kernel_count;

static void read_sizes(struct kernel *kernel, char *list) {
    for (char *item = strtok(list, ","); item && *item != '-' && kernel->parameter_count < MAX_PARAMETERS; item = strtok(NULL, ","))
        kernel->parameter_bytes[kernel->parameter_count++] = (unsigned)strtoul(item, NULL, 10);
}

static void read_table(void) {
    const char *path = getenv("SIMULATED_CUDA_KERNELS");
    FILE *file = path && !kernels ? fopen(path, "r") : NULL;
    if (!file) return;
    char line[1024], list[512];
    while (fgets(line, sizeof line, file)) {
        kernels = realloc(kernels, (kernel_count + 1) * sizeof *kernels);
        if (!kernels) abort();
        struct kernel kernel = {0};
        if (sscanf(line, "%x %15s %199s %u %u %u %511s", &kernel.checksum, kernel.architecture, kernel.name, &kernel.registers,
                   &kernel.threads, &kernel.shared, list) != 7)
            abort();
        read_sizes(&kernel, list);
        kernels[kernel_count++] = kernel;
    }
    fclose(file);
}

// The rank of code for an architecture. The driver loads the code with the highest rank. Code with rank 0 does not run on the device.
static int code_rank(const char *architecture) {
    int capability = simulated_capability(simulated_context->device), number = 0;
    char letter = 0;
    if (sscanf(architecture, "compute_%d", &number) == 1) return number <= capability ? number : 0;
    if (sscanf(architecture, "sm_%d%c", &number, &letter) < 1) return 0;
    if (letter) return number == capability ? 10000 + number : 0;
    return number / 10 == capability / 10 && number <= capability ? 1000 + number : 0;
}

static uint32_t crc(const unsigned char *bytes, size_t count) {
    uint32_t table[256], sum = ~0u;
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xedb88320u : 0);
    }
    for (size_t i = 0; i < count; i++) sum = sum >> 8 ^ table[(sum ^ bytes[i]) & 0xff];
    return ~sum;
}

static CUresult load(CUmodule *module, const void *image) {
    TRY(simulated_ready(true));
    TRY(simulated_unsafe("cuModuleLoadData"));
    read_table();
    struct CUmod_st made = {.context = simulated_context};
    // The start of a fat binary: `header` is the size of its header, `bytes` that of what follows the header.
    struct {
        uint32_t magic;
        uint16_t version, header;
        uint64_t bytes;
    } fat;
    memcpy(&fat, image, 4); // the magic number alone, because PTX text may be shorter than a header
    if (fat.magic == 0xba55ed50u) {
        memcpy(&fat, image, sizeof fat);
        made.checksum = crc(image, fat.header + fat.bytes);
        int best = 0;
        for (size_t i = 0; i < kernel_count; i++) {
            int rank = kernels[i].checksum == made.checksum ? code_rank(kernels[i].architecture) : 0;
            if (rank <= best) continue;
            best = rank;
            memcpy(made.architecture, kernels[i].architecture, sizeof made.architecture);
        }
        if (kernels && !best) return simulated_fail("cuModuleLoadData", CUDA_ERROR_NO_BINARY_FOR_GPU, "architecture");
    } else if (!(made.text = strdup(image))) {
        abort();
    }
    *module = malloc(sizeof made);
    if (!*module) abort();
    **module = made;
    simulated_log("module architecture=%s", *made.architecture ? made.architecture : "any");
    return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) { LOCKED(load(module, image)); }

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    (void)module, (void)path;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuModuleUnload(CUmodule module) {
    (void)module;
    return CUDA_SUCCESS;
}

// Whether the PTX `text` defines the function `name`.
static bool has_entry(const char *text, const char *name) {
    size_t length = strlen(name);
    for (const char *at = text; (at = strstr(at, ".entry "));) {
        at += strlen(".entry ");
        if (strncmp(at, name, length) == 0 && strchr("( \n\r", at[length])) return true;
    }
    return false;
}

static CUresult get_function(CUfunction *function, CUmodule module, const char *name) {
    const struct kernel *found = NULL;
    for (size_t i = 0; i < kernel_count && !module->text; i++)
        if (kernels[i].checksum == module->checksum && !strcmp(kernels[i].architecture, module->architecture) &&
            !strcmp(kernels[i].name, name))
            found = &kernels[i];
    if (module->text ? !has_entry(module->text, name) : kernels && !found)
        return simulated_fail(name, CUDA_ERROR_NOT_FOUND, "function");
    struct CUfunc_st *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->module = module;
    snprintf(made->name, sizeof made->name, "%s", name);
    made->kernel = found;
    made->dynamic = (48u << 10) - (found ? found->shared : 0);
    *function = made;
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { LOCKED(get_function(function, module, name)); }

// The most shared memory of a block, in bytes.
unsigned simulated_most_shared(int device) {
    switch (simulated_capability(device)) {
    case 80: case 87: return 163u << 10;
    case 90: case 100: case 103: return 227u << 10;
    default: return 99u << 10;
    }
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
    unsigned fixed = function->kernel ? function->kernel->shared : 0;
    if (value < 0 || (unsigned)value + fixed > simulated_most_shared(function->module->context->device))
        return simulated_fail("cuFuncSetAttribute", CUDA_ERROR_INVALID_VALUE, "shared-memory");
    function->dynamic = (unsigned)value;
    return CUDA_SUCCESS;
}

// Ten times the compute capability for which code is compiled: 90 for sm_90a and for compute_90. 0 if the architecture is not known.
static int compiled_for(const char *architecture) {
    const char *number = strchr(architecture, '_');
    return number ? atoi(number + 1) : 0;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    const struct kernel *kernel = function->kernel;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = kernel && kernel->threads ? (int)kernel->threads : 1024; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = kernel ? (int)kernel->shared : 0; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = kernel ? (int)kernel->registers : 0; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = (int)function->dynamic; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION: *value = compiled_for(function->module->architecture); break;
    default: *value = 0; break;
    }
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    // As with compute capability 9.0: a multiprocessor runs 2048 threads and has 228 KiB of shared memory, of which it reserves 1 KiB for
    // each block.
    size_t all = shared + 1024 + (function->kernel ? function->kernel->shared : 0);
    int by_threads = threads > 0 ? 2048 / threads : 0, by_shared = (int)(((size_t)228 << 10) / all);
    *blocks = by_threads < by_shared ? by_threads : by_shared;
    return CUDA_SUCCESS;
}

// Check the parameters of a launch, and write them as text. An eight-byte parameter that looks like a device address must be an allocated
// address. A device address is a host address plus BIAS (memory.c), and host addresses are near the end of the 47-bit address space.
// Integers such as seeds and offsets are lower than all device addresses, and f64 numbers are higher.
static CUresult check_parameters(const struct kernel *kernel, void **parameters, char *text, size_t room) {
    size_t used = 0;
    for (unsigned i = 0; kernel && i < kernel->parameter_count; i++) {
        cuuint64_t value = 0;
        unsigned bytes = kernel->parameter_bytes[i];
        struct iovec to = {&value, bytes < 8 ? bytes : 8}, from = {parameters[i], to.iov_len};
        // Where the caller gave too few arguments, this call fails; a plain read would crash.
        if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != (ssize_t)to.iov_len)
            return simulated_fail(kernel->name, CUDA_ERROR_INVALID_VALUE, "too-few-arguments");
        bool address = bytes == 8 && simulated_looks_like_device(value);
        if (address && !simulated_covers(value, 1)) {
            simulated_log("refused call=%s status=700 why=argument-%u-is-not-within-an-allocation", kernel->name, i);
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
        if (used >= room) continue;
        const char *comma = i ? "," : "";
        if (address) used += (size_t)snprintf(text + used, room - used, "%sdevice", comma);
        else if (bytes > 8) used += (size_t)snprintf(text + used, room - used, "%s[%u]", comma, bytes);
        else used += (size_t)snprintf(text + used, room - used, "%s0x%llx", comma, (unsigned long long)value);
    }
    return CUDA_SUCCESS;
}

// `early`: the kernel may start while the kernel before it in the stream still runs (programmatic dependent launch). Only code that is
// compiled for 9.0 or later can wait for the kernel before it.
static CUresult launch(CUfunction function, const unsigned grid[3], const unsigned block[3], unsigned shared, CUstream stream,
                       void **parameters, bool early) {
    TRY(simulated_stream("cuLaunchKernel", stream));
    const struct kernel *kernel = function->kernel;
    if (stream && stream->context != function->module->context)
        return simulated_fail(function->name, CUDA_ERROR_INVALID_HANDLE, "function-of-another-device");
    unsigned long long threads = (unsigned long long)block[0] * block[1] * block[2];
    bool grid_fits = grid[0] && grid[1] && grid[2] && grid[0] <= 2147483647u && grid[1] <= 65535 && grid[2] <= 65535;
    if (!grid_fits) return simulated_fail(function->name, CUDA_ERROR_INVALID_VALUE, "grid");
    if (!threads || threads > 1024 || block[2] > 64) return simulated_fail(function->name, CUDA_ERROR_INVALID_VALUE, "block");
    if (shared > function->dynamic) return simulated_fail(function->name, CUDA_ERROR_INVALID_VALUE, "shared-memory");
    unsigned long long warps = (threads + 31) / 32;
    if (kernel && kernel->threads && threads > kernel->threads)
        return simulated_fail(function->name, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "launch-bounds");
    // A multiprocessor has 65536 registers, and each thread gets a multiple of 8.
    if (kernel && warps * 32 * ((kernel->registers + 7) / 8 * 8) > 65536)
        return simulated_fail(function->name, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "registers");
    if (early && compiled_for(function->module->architecture) < 90)
        return simulated_fail(function->name, CUDA_ERROR_INVALID_VALUE, "launched-early");
    char text[512] = "";
    TRY(check_parameters(kernel, parameters, text, sizeof text));
    simulated_log("launch name=%s grid=%u,%u,%u block=%u,%u,%u shared=%u early=%d captured=%d arguments=%s", function->name, grid[0], grid[1],
                  grid[2], block[0], block[1], block[2], shared, early, simulated_capturing(stream), text);
    simulated_queue(stream, (struct CUgraphNode_st){.kind = LAUNCH});
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned shared, CUstream stream, void **parameters, void **extra) {
    (void)extra;
    const unsigned grid[3] = {grid_x, grid_y, grid_z}, block[3] = {block_x, block_y, block_z};
    LOCKED(launch(function, grid, block, shared, stream, parameters, false));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    (void)extra;
    const unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    const unsigned block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
    bool early = false;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            early = config->attrs[i].value.programmaticStreamSerializationAllowed;
        if (config->attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
        const unsigned cluster[3] = {config->attrs[i].value.clusterDim.x, config->attrs[i].value.clusterDim.y,
                                     config->attrs[i].value.clusterDim.z};
        for (int axis = 0; axis < 3; axis++)
            if (!cluster[axis] || grid[axis] % cluster[axis]) return CUDA_ERROR_INVALID_CLUSTER_SIZE;
    }
    LOCKED(launch(function, grid, block, config->sharedMemBytes, config->hStream, parameters, early));
}

static unsigned element_bytes(CUtensorMapDataType type) {
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16: case CU_TENSOR_MAP_DATA_TYPE_FLOAT16: case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64: case CU_TENSOR_MAP_DATA_TYPE_INT64: case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 4;
    }
}

// Check the requirements that tiled and im2col tensor maps share. Returns the first requirement that the arguments violate, or NULL.
// `bytes` is the size of an element. `strides` has the strides of all dimensions but the first, in bytes; `steps` has the element strides.
static const char *bad_tensor(unsigned bytes, unsigned rank, const void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                              const cuuint32_t *steps) {
    if (rank < 1 || rank > 5) return "rank";
    if ((uintptr_t)address % 16) return "address-is-not-a-multiple-of-16";
    cuuint64_t row_bytes = sizes[0] * bytes, last_row = 0; // the last row's offset, in bytes
    for (unsigned i = 0; i < rank; i++) {
        if (!sizes[i] || sizes[i] > 1ULL << 32) return "size";
        if (!steps[i] || steps[i] > 8) return "element-stride";
        if (i == 0) continue;
        cuuint64_t stride = strides[i - 1];
        if (stride % 16 || stride >= 1ULL << 40) return "stride-is-not-a-multiple-of-16";
        last_row += stride * (sizes[i] - 1);
    }
    bool covered;
    pthread_mutex_lock(&simulated_lock);
    covered = simulated_covers((uintptr_t)address, last_row + row_bytes);
    pthread_mutex_unlock(&simulated_lock);
    return covered ? NULL : "not-within-an-allocation";
}

// Check the bytes of a box along the first dimension, `inner`. Returns the violated requirement, or NULL.
static const char *bad_inner(CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, cuuint64_t inner) {
    const unsigned widths[] = {0, 32, 64, 128};
    if (inner % 16) return "inner-box-is-not-a-multiple-of-16-bytes";
    if (interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle <= CU_TENSOR_MAP_SWIZZLE_128B && widths[swizzle] &&
        inner > widths[swizzle])
        return "inner-box-is-wider-than-the-swizzle";
    return NULL;
}

static CUresult encoded(const char *call, CUtensorMap *map, const char *bad) {
    if (bad) return simulated_fail(call, CUDA_ERROR_INVALID_VALUE, bad);
    memset(map, 0, sizeof *map);
    simulated_log("tensor-map call=%s", call);
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
                                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill outside) {
    (void)promotion, (void)outside;
    unsigned bytes = element_bytes(type);
    const char *bad = bad_tensor(bytes, rank, address, sizes, strides, steps);
    for (unsigned i = 0; !bad && i < rank; i++)
        if (!box[i] || box[i] > 256) bad = "box";
    if (!bad) bad = bad_inner(interleave, swizzle, (cuuint64_t)box[0] * bytes);
    return encoded("cuTensorMapEncodeTiled", map, bad);
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
                                 const cuuint64_t *strides, const int *lower, const int *upper, cuuint32_t channels, cuuint32_t pixels,
                                 const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill outside) {
    (void)promotion, (void)outside;
    unsigned bytes = element_bytes(type);
    const char *bad = bad_tensor(bytes, rank, address, sizes, strides, steps);
    if (!bad && rank < 3) bad = "rank";
    int most = rank == 3 ? 32768 : rank == 4 ? 128 : 16;
    for (unsigned i = 0; !bad && i < rank - 2; i++)
        if (lower[i] < -most || lower[i] >= most || upper[i] < -most || upper[i] >= most) bad = "pixel-box";
    if (!bad && (!channels || channels > 256)) bad = "channels";
    if (!bad && (!pixels || pixels > 1024)) bad = "pixels";
    if (!bad) bad = bad_inner(interleave, swizzle, (cuuint64_t)channels * bytes);
    return encoded("cuTensorMapEncodeIm2col", map, bad);
}
