// cuBLASLt: it has one algorithm for every product, and computes nothing.
#include "blas.h"

// `compute` and `scale` are types, not values. `scales` and `scale_modes` are those of operands a and b.
struct descriptor {
    int compute, scale, transpose_a, transpose_b, epilogue, bias_type, pointer_mode;
    int scale_modes[2];
    int8_t fast;
    const void *bias, *aux, *scales[2];
    long long aux_distance;
};

struct preference {
    size_t workspace;
};

struct result {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

int cublasLtCreate(void **handle) {
    *handle = malloc(1);
    return *handle ? SUCCESS : NOT_INITIALIZED;
}
int cublasLtDestroy(void *handle) {
    free(handle);
    return SUCCESS;
}

size_t cublasLtGetVersion(void) { return 130000; }

int cublasLtMatrixLayoutCreate(struct matrix **layout, int type, uint64_t rows, uint64_t columns, int64_t distance) {
    *layout = malloc(sizeof **layout);
    if (!*layout) return NOT_INITIALIZED;
    **layout = (struct matrix){type, (long long)rows, (long long)columns, distance, 1, 0};
    return type_bytes(type) ? SUCCESS : INVALID_VALUE;
}
int cublasLtMatrixLayoutDestroy(struct matrix *layout) {
    free(layout);
    return SUCCESS;
}

static int copy(void *to, size_t wanted, const void *from, size_t bytes) {
    if (bytes != wanted) {
        simulatedLog("refused call=cublasLt-attribute status=7 why=size");
        return INVALID_VALUE;
    }
    memcpy(to, from, bytes);
    return SUCCESS;
}

int cublasLtMatrixLayoutSetAttribute(struct matrix *layout, int attribute, const void *value, size_t bytes) {
    enum { TYPE, ORDER, ROWS, COLUMNS, DISTANCE, COUNT, STRIDE };
    int32_t number;
    switch (attribute) {
    case TYPE: return copy(&layout->type, 4, value, bytes);
    case ROWS: return copy(&layout->rows, 8, value, bytes);
    case COLUMNS: return copy(&layout->columns, 8, value, bytes);
    case DISTANCE: return copy(&layout->distance, 8, value, bytes);
    case STRIDE: return copy(&layout->stride, 8, value, bytes);
    case COUNT: {
        int status = copy(&number, 4, value, bytes);
        if (status == SUCCESS) layout->count = number;
        return status;
    }
    case ORDER: // only the default, column-major, is simulated
        return copy(&number, 4, value, bytes) == SUCCESS && number == 0 ? SUCCESS : NOT_SUPPORTED;
    default: return NOT_SUPPORTED;
    }
}

int cublasLtMatmulDescCreate(struct descriptor **descriptor, int compute, int scale) {
    *descriptor = calloc(1, sizeof **descriptor);
    if (!*descriptor) return NOT_INITIALIZED;
    (*descriptor)->compute = compute;
    (*descriptor)->scale = scale;
    (*descriptor)->epilogue = 1;
    (*descriptor)->bias_type = -1;
    return SUCCESS;
}
int cublasLtMatmulDescDestroy(struct descriptor *descriptor) {
    free(descriptor);
    return SUCCESS;
}

int cublasLtMatmulDescSetAttribute(struct descriptor *descriptor, int attribute, const void *value, size_t bytes) {
    enum {
        COMPUTE, SCALE, POINTER_MODE, TRANSPOSE_A, TRANSPOSE_B, EPILOGUE = 7, BIAS = 8, AUX = 11, AUX_DISTANCE = 12, A_SCALES = 17,
        B_SCALES = 18, FAST_ACCUMULATION = 25, BIAS_TYPE = 26, A_SCALE_MODE = 31, B_SCALE_MODE = 32
    };
    switch (attribute) {
    case COMPUTE: return copy(&descriptor->compute, 4, value, bytes);
    case SCALE: return copy(&descriptor->scale, 4, value, bytes);
    case POINTER_MODE: return copy(&descriptor->pointer_mode, 4, value, bytes);
    case TRANSPOSE_A: return copy(&descriptor->transpose_a, 4, value, bytes);
    case TRANSPOSE_B: return copy(&descriptor->transpose_b, 4, value, bytes);
    case EPILOGUE: return copy(&descriptor->epilogue, 4, value, bytes);
    case BIAS: return copy(&descriptor->bias, 8, value, bytes);
    case AUX: return copy(&descriptor->aux, 8, value, bytes);
    case AUX_DISTANCE: return copy(&descriptor->aux_distance, 8, value, bytes);
    case FAST_ACCUMULATION: return copy(&descriptor->fast, 1, value, bytes);
    case BIAS_TYPE: return copy(&descriptor->bias_type, 4, value, bytes);
    case A_SCALES: case B_SCALES: return copy(&descriptor->scales[attribute - A_SCALES], 8, value, bytes);
    case A_SCALE_MODE: case B_SCALE_MODE: return copy(&descriptor->scale_modes[attribute - A_SCALE_MODE], 4, value, bytes);
    default: return SUCCESS;
    }
}

int cublasLtMatmulPreferenceCreate(struct preference **preference) {
    *preference = calloc(1, sizeof **preference);
    return *preference ? SUCCESS : NOT_INITIALIZED;
}
int cublasLtMatmulPreferenceDestroy(struct preference *preference) {
    free(preference);
    return SUCCESS;
}
int cublasLtMatmulPreferenceSetAttribute(struct preference *preference, int attribute, const void *value, size_t bytes) {
    const int MAX_WORKSPACE_BYTES = 1;
    return attribute == MAX_WORKSPACE_BYTES ? copy(&preference->workspace, sizeof preference->workspace, value, bytes) : SUCCESS;
}

// The scale mode in which a product has a scale for each row of `a` and each column of `b`.
enum { OUTER_VECTOR = 3 };

// What is wrong with the operands of a product, or NULL.
static const char *wrong(const struct descriptor *descriptor, const struct matrix *a, const struct matrix *b, const struct matrix *c,
                         const struct matrix *d) {
    long long inner_a = descriptor->transpose_a ? a->rows : a->columns, inner_b = descriptor->transpose_b ? b->columns : b->rows;
    long long m = descriptor->transpose_a ? a->columns : a->rows, n = descriptor->transpose_b ? b->rows : b->columns;
    if (inner_a != inner_b || d->rows != m || d->columns != n || c->rows != m || c->columns != n) return "shapes";
    const struct matrix *all[] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        if (all[i]->distance < all[i]->rows || all[i]->rows < 1 || all[i]->columns < 1) return "leading-dimension";
        if (all[i]->count != d->count) return "batch";
    }
    if (a->type != b->type || c->type != d->type) return "types";
    const int E4M3 = 28, HALF = 2, BF16 = 14;
    // The real library multiplies e4m3 only in this layout: `a` transposed, `b` not, columns aligned to 16 bytes.
    if (a->type == E4M3 && (!descriptor->transpose_a || descriptor->transpose_b || a->distance % 16 || b->distance % 16)) return "layout";
    const int *modes = descriptor->scale_modes;
    if (modes[0] || modes[1]) {
        if (modes[0] != OUTER_VECTOR || modes[1] != OUTER_VECTOR || !descriptor->scales[0] || !descriptor->scales[1]) return "scales";
        if (a->type != E4M3 || (d->type != HALF && d->type != BF16)) return "types";
    }
    return NULL;
}

static int refuse(const char *why) {
    char text[100];
    snprintf(text, sizeof text, "refused call=cublasLtMatmul status=%d why=%s", INVALID_VALUE, why);
    simulatedLog(text);
    return INVALID_VALUE;
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, const struct descriptor *descriptor, const struct matrix *a, const struct matrix *b,
                                   const struct matrix *c, const struct matrix *d, const struct preference *preference, int requested,
                                   struct result *results, int *found) {
    (void)handle;
    *found = 0;
    const char *why = requested < 1 ? "requested" : wrong(descriptor, a, b, c, d);
    if (why) return refuse(why);
    // The algorithm uses the allowed workspace, up to 1 MiB.
    results[0] = (struct result){.algorithm = {1}, .workspace = preference->workspace < 1 << 20 ? preference->workspace : 1 << 20, .waves = 1};
    *found = 1;
    simulatedLog("heuristic");
    return SUCCESS;
}

int cublasLtMatmulAlgoConfigGetAttribute(const uint64_t *algorithm, int attribute, void *to, size_t bytes, size_t *written) {
    (void)algorithm, (void)attribute;
    memset(to, 0, bytes);
    *written = bytes;
    return SUCCESS;
}

int cublasLtMatmul(void *handle, const struct descriptor *descriptor, const void *alpha, const void *a, const struct matrix *layout_a,
                   const void *b, const struct matrix *layout_b, const void *beta, const void *c, const struct matrix *layout_c, void *d,
                   const struct matrix *layout_d, const uint64_t *algorithm, void *workspace, size_t bytes, CUstream stream) {
    (void)handle, (void)alpha;
    const int F64 = 1, BIAS = 4;
    const char *why = wrong(descriptor, layout_a, layout_b, layout_c, layout_d);
    if (!why && algorithm && *algorithm != 1) why = "algorithm";
    if (why) return refuse(why);
    // Only host memory can be read here: in the other pointer modes, beta counts as 0.
    double factor = descriptor->pointer_mode ? 0 : descriptor->scale == F64 ? *(const double *)beta : *(const float *)beta;
    struct simulated_range ranges[8] = {range_of(a, *layout_a), range_of(b, *layout_b), range_of(d, *layout_d)};
    int count = 3;
    if (factor != 0) ranges[count++] = range_of(c, *layout_c);
    if (bytes) ranges[count++] = (struct simulated_range){(CUdeviceptr)(uintptr_t)workspace, bytes};
    for (int i = 0; i < 2; i++) { // the scales of a's rows, then those of b's columns
        size_t length = (size_t)(i ? layout_d->columns : layout_d->rows);
        if (descriptor->scale_modes[i] == OUTER_VECTOR)
            ranges[count++] = (struct simulated_range){(CUdeviceptr)(uintptr_t)descriptor->scales[i], length * 4};
    }
    if (descriptor->epilogue & BIAS) {
        int type = descriptor->bias_type < 0 ? layout_d->type : descriptor->bias_type;
        ranges[count++] =
            (struct simulated_range){(CUdeviceptr)(uintptr_t)descriptor->bias, (size_t)layout_d->rows * type_bytes(type)};
    }
    return queue_product(descriptor->fast ? "cublasLtMatmul fast=1" : "cublasLtMatmul fast=0", stream, layout_d->rows, layout_d->columns,
                         descriptor->transpose_a ? layout_a->rows : layout_a->columns, layout_d->count, layout_a->type, layout_d->type,
                         factor, descriptor->epilogue, ranges, count);
}
