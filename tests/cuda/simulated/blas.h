// Shared by cuBLAS and cuBLASLt: column-major matrices, and the memory that they occupy.
#pragma once

#include "simulated.h"

enum { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };

static inline size_t type_bytes(int type) {
    switch (type) {
    case 0: return 4;          // CUDA_R_32F
    case 1: return 8;          // CUDA_R_64F
    case 2: case 14: return 2; // CUDA_R_16F, CUDA_R_16BF
    case 3: return 1;          // CUDA_R_8I
    case 10: return 4;         // CUDA_R_32I
    case 28: return 1;         // CUDA_R_8F_E4M3
    default: return 0;
    }
}

// A batch of `count` matrices. `type` is a cudaDataType. `distance` (the leading dimension) is the distance between two columns, and
// `stride` is the distance between two matrices, both in elements.
struct matrix {
    int type;
    long long rows, columns, distance, count, stride;
};

// The memory from the first to the last element of a batch of matrices.
static inline struct simulated_range range_of(const void *address, struct matrix matrix) {
    long long last = matrix.rows + (matrix.columns - 1) * matrix.distance;
    if (matrix.count > 1 && matrix.stride > 0) last += (matrix.count - 1) * matrix.stride;
    return (struct simulated_range){(CUdeviceptr)(uintptr_t)address, (size_t)last * type_bytes(matrix.type)};
}

static inline int queue_product(const char *call, CUstream stream, long long m, long long n, long long k, long long count, int type,
                                int result, double beta, int epilogue, const struct simulated_range *ranges, int range_count) {
    char text[200];
    snprintf(text, sizeof text, "product call=%s m=%lld n=%lld k=%lld count=%lld types=%d,%d beta=%g epilogue=%d", call, m, n, k, count,
             type, result, beta, epilogue);
    return simulatedProduct(stream, text, ranges, range_count) == CUDA_SUCCESS ? SUCCESS : EXECUTION_FAILED;
}
