// cuBLAS: products are checked and logged, not computed.
#include "blas.h"

struct handle {
    CUstream stream;
    void *workspace;
    bool device_scalars;
};

int cublasCreate_v2(struct handle **handle) {
    *handle = calloc(1, sizeof **handle);
    return *handle ? SUCCESS : NOT_INITIALIZED;
}
int cublasDestroy_v2(struct handle *handle) {
    free(handle);
    return SUCCESS;
}
int cublasSetStream_v2(struct handle *handle, CUstream stream) {
    handle->stream = stream;
    handle->workspace = NULL; // cublasSetStream of the real library also resets the workspace
    return SUCCESS;
}
int cublasGetStream_v2(struct handle *handle, CUstream *stream) {
    *stream = handle->stream;
    return SUCCESS;
}
int cublasSetWorkspace_v2(struct handle *handle, void *workspace, size_t bytes) {
    (void)bytes;
    handle->workspace = workspace;
    return SUCCESS;
}
int cublasSetMathMode(struct handle *handle, int mode) {
    (void)handle;
    const int DISALLOW_REDUCED_PRECISION_REDUCTION = 1 << 4;
    simulatedLog(mode & DISALLOW_REDUCED_PRECISION_REDUCTION ? "math-mode reduced=0" : "math-mode reduced=1");
    return SUCCESS;
}
int cublasSetPointerMode_v2(struct handle *handle, int mode) {
    const int POINTER_MODE_DEVICE = 1;
    handle->device_scalars = mode == POINTER_MODE_DEVICE;
    return SUCCESS;
}

struct product {
    int transpose_a, transpose_b;
    long long m, n, k, count;
    struct matrix a, b, c;
};

// Whether cuBLAS accepts the sizes and types. If it accepts the types, this also sets the sizes of the matrices.
static bool sound(struct product *product) {
    if (product->m < 0 || product->n < 0 || product->k < 0 || product->count < 0) return false;
    if (!type_bytes(product->a.type) || product->a.type != product->b.type || !type_bytes(product->c.type)) return false;
    product->a.rows = product->transpose_a ? product->k : product->m;
    product->a.columns = product->transpose_a ? product->m : product->k;
    product->b.rows = product->transpose_b ? product->n : product->k;
    product->b.columns = product->transpose_b ? product->k : product->n;
    product->c.rows = product->m;
    product->c.columns = product->n;
    product->a.count = product->b.count = product->c.count = product->count;
    return product->a.distance >= product->a.rows && product->b.distance >= product->b.rows && product->c.distance >= product->m;
}

static int multiply(const char *call, struct handle *handle, struct product product, const void *a, const void *b, void *c, double beta) {
    if (!sound(&product)) {
        simulatedLog("refused call=product status=7 why=sizes-or-types");
        return INVALID_VALUE;
    }
    if (!product.m || !product.n || !product.k || !product.count) return SUCCESS;
    const struct simulated_range ranges[] = {range_of(a, product.a), range_of(b, product.b), range_of(c, product.c)};
    const int NO_EPILOGUE = 0;
    return queue_product(call, handle->stream, product.m, product.n, product.k, product.count, product.a.type, product.c.type, beta,
                         NO_EPILOGUE, ranges, 3);
}

// The value of beta for the log. It is 0 if this cannot read beta: in device memory, or in half precision, which the library never uses.
static double scalar(const struct handle *handle, const void *value, int compute) {
    const int COMPUTE_64F = 70, COMPUTE_64F_PEDANTIC = 71, COMPUTE_16F = 64, COMPUTE_16F_PEDANTIC = 65;
    if (handle->device_scalars || !value) return 0;
    if (compute == COMPUTE_64F || compute == COMPUTE_64F_PEDANTIC) return *(const double *)value;
    return compute == COMPUTE_16F || compute == COMPUTE_16F_PEDANTIC ? 0 : *(const float *)value;
}

int cublasGemmStridedBatchedEx(struct handle *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha,
                               const void *a, int type_a, int distance_a, long long stride_a, const void *b, int type_b, int distance_b,
                               long long stride_b, const void *beta, void *c, int type_c, int distance_c, long long stride_c, int count,
                               int compute, int algorithm) {
    (void)alpha, (void)algorithm;
    struct product product = {transpose_a, transpose_b, m, n, k, count,
                              {.type = type_a, .distance = distance_a, .stride = stride_a},
                              {.type = type_b, .distance = distance_b, .stride = stride_b},
                              {.type = type_c, .distance = distance_c, .stride = stride_c}};
    return multiply("cublasGemmStridedBatchedEx", handle, product, a, b, c, scalar(handle, beta, compute));
}

int cublasGemmEx(struct handle *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha, const void *a,
                 int type_a, int distance_a, const void *b, int type_b, int distance_b, const void *beta, void *c, int type_c,
                 int distance_c, int compute, int algorithm) {
    (void)alpha, (void)algorithm;
    struct product product = {transpose_a, transpose_b, m, n, k, 1,
                              {.type = type_a, .distance = distance_a},
                              {.type = type_b, .distance = distance_b},
                              {.type = type_c, .distance = distance_c}};
    return multiply("cublasGemmEx", handle, product, a, b, c, scalar(handle, beta, compute));
}

// `a`, `b` and `c` are arrays in device memory with the addresses of the matrices. Only these arrays are checked, not the matrices.
int cublasGemmBatchedEx(struct handle *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha,
                        const void *const a[], int type_a, int distance_a, const void *const b[], int type_b, int distance_b,
                        const void *beta, void *const c[], int type_c, int distance_c, int count, int compute, int algorithm) {
    (void)alpha, (void)algorithm;
    struct product product = {transpose_a, transpose_b, m, n, k, 1,
                              {.type = type_a, .distance = distance_a},
                              {.type = type_b, .distance = distance_b},
                              {.type = type_c, .distance = distance_c}};
    if (!sound(&product) || count < 0) {
        simulatedLog("refused call=product status=7 why=sizes-or-types");
        return INVALID_VALUE;
    }
    if (!m || !n || !k || !count) return SUCCESS;
    size_t bytes = (size_t)count * sizeof(void *);
    const struct simulated_range ranges[] = {
        {(CUdeviceptr)(uintptr_t)a, bytes}, {(CUdeviceptr)(uintptr_t)b, bytes}, {(CUdeviceptr)(uintptr_t)c, bytes}};
    const int NO_EPILOGUE = 0;
    return queue_product("cublasGemmBatchedEx", handle->stream, m, n, k, count, type_a, type_c, scalar(handle, beta, compute),
                         NO_EPILOGUE, ranges, 3);
}

int cublasDgemmStridedBatched(struct handle *handle, int transpose_a, int transpose_b, int m, int n, int k, const double *alpha,
                              const double *a, int distance_a, long long stride_a, const double *b, int distance_b, long long stride_b,
                              const double *beta, double *c, int distance_c, long long stride_c, int count) {
    (void)alpha;
    const int F64 = 1;
    struct product product = {transpose_a, transpose_b, m, n, k, count,
                              {.type = F64, .distance = distance_a, .stride = stride_a},
                              {.type = F64, .distance = distance_b, .stride = stride_b},
                              {.type = F64, .distance = distance_c, .stride = stride_c}};
    return multiply("cublasDgemmStridedBatched", handle, product, a, b, c, *beta);
}
