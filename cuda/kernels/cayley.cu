// Computes D = (I - Q) (I + Q)^-1 - I, the Cayley transform of a skew-symmetric matrix Q minus the identity, for `count` matrices. D is
// also -2 Q (I + Q)^-1, and Q commutes with the inverse. So D is the solution of (I + Q) D = -2 Q, which Gauss-Jordan elimination finds.
// The symmetric part of I + Q is I, so each pivot is at least 1, and no rows need to be exchanged.
//
// upper (count, size (size - 1) / 2) has the elements of each Q above the diagonal, row by row; grad_upper is its gradient. change (count,
// size, size) has the matrices D, and grad is its gradient.
// Launch: block (32, 8), grid min(count, 2^31 - 1); any grid gives the correct result. Dynamic shared memory: 2 size² numbers of f32, or
// of f64 for the kernels of f64.

#include "element.cuh"

namespace {

template <typename A> __device__ __forceinline__ A *shared_memory() {
    extern __shared__ __align__(16) unsigned char shared[];
    return reinterpret_cast<A *>(shared);
}

// Calls f(row, column) for every row < rows and every column with first <= column < last. All threads of the block share the calls.
template <typename F> __device__ __forceinline__ void for_each(uint32_t rows, uint32_t first, uint32_t last, F f) {
    for (uint32_t row = threadIdx.y; row < rows; row += blockDim.y)
        for (uint32_t column = first + threadIdx.x; column < last; column += blockDim.x) f(row, column);
}

// The index of element (row, column), with row < column, in the list of the elements above the diagonal.
__device__ __forceinline__ uint32_t upper_index(uint32_t row, uint32_t column, uint32_t size) {
    return row * (2 * size - row - 1) / 2 + column - row - 1;
}

template <typename T>
__device__ __forceinline__ void forward(const T *__restrict__ upper, T *__restrict__ change, uint64_t count, uint32_t size) {
    using A = Acc<T>;
    // The matrix [I + Q | -2 Q]. The elimination turns it into [I | D], but does not write the left columns that it no longer reads.
    A *system = shared_memory<A>();
    const uint32_t width = 2 * size, triangle = size * (size - 1) / 2;
    for (uint64_t matrix = blockIdx.x; matrix < count; matrix += gridDim.x) {
        for_each(size, 0, size, [&](uint32_t row, uint32_t column) {
            const T *elements = upper + matrix * triangle;
            A q = 0;
            if (row < column) q = widen(elements[upper_index(row, column, size)]);
            else if (row > column) q = -widen(elements[upper_index(column, row, size)]);
            system[row * width + column] = row == column ? A(1) : q;
            system[row * width + size + column] = -2 * q;
        });
        __syncthreads();
        for (uint32_t pivot = 0; pivot < size; pivot++) {
            // `for_each` multiplies the elements of the pivot's row by `inverse` as it reads them. Only the loop after it stores the
            // products, because all threads read this row.
            const A inverse = A(1) / system[pivot * width + pivot];
            for_each(size, pivot + 1, width, [&](uint32_t row, uint32_t column) {
                if (row == pivot) return;
                const A of_pivot = system[pivot * width + column] * inverse;
                system[row * width + column] -= system[row * width + pivot] * of_pivot;
            });
            __syncthreads();
            for (uint32_t column = pivot + 1 + threadIdx.y * blockDim.x + threadIdx.x; column < width;
                 column += blockDim.x * blockDim.y)
                system[pivot * width + column] *= inverse;
            __syncthreads();
        }
        for_each(size, 0, size, [&](uint32_t row, uint32_t column) {
            change[(matrix * size + row) * size + column] = narrow<T>(system[row * width + size + column]);
        });
        __syncthreads();
    }
}

// With V = (I + Q)^-1 = I + D / 2 and G = grad, the gradient of Q as a matrix of independent elements is -2 V^T G V^T. But an element of
// `upper` occurs in Q at (row, column) above the diagonal and, negated, at (column, row). So its gradient is this matrix at (row, column)
// minus this matrix at (column, row).
template <typename T>
__device__ __forceinline__ void backward(const T *__restrict__ grad, const T *__restrict__ change, T *__restrict__ grad_upper,
                                         uint64_t count, uint32_t size) {
    using A = Acc<T>;
    const uint32_t square = size * size, triangle = size * (size - 1) / 2;
    A *d = shared_memory<A>(), *left = d + square;
    for (uint64_t matrix = blockIdx.x; matrix < count; matrix += gridDim.x) {
        const T *g = grad + matrix * square;
        for_each(size, 0, size, [&](uint32_t row, uint32_t column) {
            d[row * size + column] = widen(change[matrix * square + row * size + column]);
        });
        __syncthreads();
        // `left` becomes V^T G.
        for_each(size, 0, size, [&](uint32_t row, uint32_t column) {
            A sum = 0;
            for (uint32_t k = 0; k < size; k++) sum += d[k * size + row] * widen(g[k * size + column]);
            left[row * size + column] = widen(g[row * size + column]) + A(0.5) * sum;
        });
        __syncthreads();
        // An element of V^T G V^T.
        const auto element = [&](uint32_t row, uint32_t column) {
            A sum = 0;
            for (uint32_t k = 0; k < size; k++) sum += left[row * size + k] * d[column * size + k];
            return left[row * size + column] + A(0.5) * sum;
        };
        for_each(size, 0, size, [&](uint32_t row, uint32_t column) {
            if (row < column)
                grad_upper[matrix * triangle + upper_index(row, column, size)] =
                    narrow<T>(2 * (element(column, row) - element(row, column)));
        });
        __syncthreads();
    }
}

} // namespace

#define DEFINE_CAYLEY(SUFFIX, T)                                                                                       \
    extern "C" __global__ void cayley_forward_##SUFFIX(const T *upper, T *change, uint64_t count, uint32_t size) {     \
        follow();                                                                                                      \
        forward(upper, change, count, size);                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void cayley_backward_##SUFFIX(const T *grad, const T *change, T *grad_upper, uint64_t count, \
                                                        uint32_t size) {                                               \
        follow();                                                                                                      \
        backward(grad, change, grad_upper, count, size);                                                               \
    }
FOR_EACH_FLOAT_AND_DOUBLE(DEFINE_CAYLEY)
