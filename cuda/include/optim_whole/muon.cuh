// The step of the optimizer Muon for one variable, computed by one block of threads: the update is the momentum, made orthogonal by the
// Newton-Schulz iteration. `orthogonalize` in rust/nn/src/optim/muon.rs explains why the iteration needs only small square matrices.
#pragma once

#include "elements.cuh"

// Indices of `Settings::more`: momentum, the three coefficients of the Newton-Schulz iteration, the minimum norm by which a direction is
// divided, the number of iterations, whether updates are scaled to suit learning rates of AdamW (0 or 1).
enum MuonSetting { MOMENTUM, COEFFICIENT_A, COEFFICIENT_B, COEFFICIENT_C, LEAST_NORM, NS_STEPS, MATCHES_ADAMW };

// The number of rows of a tile of `product`: a warp computes a row.
constexpr int TILE = WHOLE_THREADS / WARP;

// Calls store(i, j, sum over k < inner of left(i, k) * right(k, j)) for all i < m and j < n. The block computes a tile of 16 by 32
// results at a time, one result per thread. Afterwards every thread of the block can read what `store` has written.
template <typename L, typename R, typename S>
static __device__ __forceinline__ void product(uint32_t m, uint32_t n, uint32_t inner, L left, R right, S store) {
    __shared__ float lefts[TILE][WARP + 1], rights[WARP][WARP + 1];
    const uint32_t row = threadIdx.x / WARP, column = threadIdx.x % WARP;
    for (uint32_t i = 0; i < m; i += TILE) {
        for (uint32_t j = 0; j < n; j += WARP) {
            float sum = 0.0f;
            for (uint32_t k = 0; k < inner; k += WARP) {
                lefts[row][column] = i + row < m && k + column < inner ? left(i + row, k + column) : 0.0f;
                for (uint32_t r = row; r < WARP; r += TILE) {
                    rights[r][column] = k + r < inner && j + column < n ? right(k + r, j + column) : 0.0f;
                }
                __syncthreads();
#pragma unroll
                for (int l = 0; l < WARP; ++l) sum = fmaf(lefts[row][l], rights[l][column], sum);
                __syncthreads();
            }
            if (i + row < m && j + column < n) store(i + row, j + column, sum);
        }
    }
    __syncthreads();
}

// The step of AdamW, for a vector with the states `mean` (`exp_avg`) and `square` (`exp_avg_sq`).
template <typename G, typename C>
static __device__ __forceinline__ void muon_vector(const Elements<G, C> &elements, const Settings &settings, float *mean, float *square) {
    const double step = static_cast<double>(settings.step);
    const float step_size = static_cast<float>(settings.lr / (1.0 - pow(settings.beta1, step)));
    const float root = static_cast<float>(sqrt(1.0 - pow(settings.beta2, step)));
    const float gain1 = static_cast<float>(1.0 - settings.beta1), beta2 = static_cast<float>(settings.beta2);
    const float gain2 = static_cast<float>(1.0 - settings.beta2), eps = static_cast<float>(settings.eps);
    const float decay = static_cast<float>(1.0 - settings.lr * settings.weight_decay);
    for_each(elements.variable.count, [&](uint64_t i) {
        const float g = elements.grad(i);
        mean[i] += gain1 * (g - mean[i]);
        square[i] = square[i] * beta2 + gain2 * g * g;
        elements.set(i, elements.param(i) * decay - step_size * mean[i] / (sqrtf(square[i]) / root + eps));
        elements.clear(i); // sets the gradient to 0, if the step is to do so
    });
}

// The step of a variable. A variable of two or more dimensions is a matrix of `height` rows, the size of the first dimension. It has one
// state, `momentum_buffer`, and scratch for four square matrices of side min(height, width). A vector has two states and no scratch; AdamW
// updates it.
template <typename G, typename C>
static __device__ __forceinline__ void muon(const Elements<G, C> &elements, const WholeStep &by, float *const (&states)[5]) {
    const Settings &settings = by.settings;
    // `state` returns the variable's values in the buffer of a state; its second argument is the state's number.
    if (states[1] != nullptr) return muon_vector(elements, settings, elements.state(states[0], 0), elements.state(states[1], 1));
    const uint64_t count = elements.variable.count;
    const uint32_t height = elements.variable.first, width = static_cast<uint32_t>(count / height);
    float *const buffer = elements.state(states[0], 0);
    const float momentum = static_cast<float>(settings.more[MOMENTUM]), gain = static_cast<float>(1.0 - settings.more[MOMENTUM]);
    for_each(count, [&](uint64_t i) { buffer[i] += gain * (elements.grad(i) - buffer[i]); });
    const auto direction = [&](uint64_t i) {
        if (!settings.nesterov) return buffer[i];
        const float g = elements.grad(i);
        return g + momentum * (buffer[i] - g);
    };
    const double squares = sum_over(count, [&](uint64_t i) { return static_cast<double>(direction(i)) * direction(i); });
    const float scale = static_cast<float>(1.0 / fmax(sqrt(squares), settings.more[LEAST_NORM]));

    // x is the direction divided by its norm, and transposed if it has more rows than columns: a matrix (side, length).
    const bool is_tall = height > width;
    const uint32_t side = is_tall ? width : height, length = is_tall ? height : width;
    // The index, in the variable, of an element of x.
    const auto index_of = [&](uint32_t i, uint32_t j) {
        return is_tall ? static_cast<uint64_t>(j) * width + i : static_cast<uint64_t>(i) * width + j;
    };
    const uint64_t area = static_cast<uint64_t>(side) * side;
    float *gram = elements.variable.scratch, *factor = gram + area, *power = factor + area, *spare = power + area;
    const auto x = [&](uint32_t i, uint32_t j) { return scale * direction(index_of(i, j)); };
    // Access to a square matrix, as `product` needs it: reading an element, and storing a sum.
    const auto elements_of = [&](const float *matrix) {
        return [=](uint32_t i, uint32_t j) { return matrix[static_cast<uint64_t>(i) * side + j]; };
    };
    const auto store_to = [&](float *matrix) {
        return [=](uint32_t i, uint32_t j, float sum) { matrix[static_cast<uint64_t>(i) * side + j] = sum; };
    };
    product(side, side, length, x, [&](uint32_t k, uint32_t j) { return x(j, k); }, store_to(gram));
    for_each(area, [&](uint64_t i) { power[i] = i % (side + 1) == 0 ? 1.0f : 0.0f; });
    const float a = static_cast<float>(settings.more[COEFFICIENT_A]), b = static_cast<float>(settings.more[COEFFICIENT_B]);
    const float c = static_cast<float>(settings.more[COEFFICIENT_C]);
    // Each iteration multiplies a matrix, x at first, from the left by factor = a I + b gram + c gram². `power` is the product of all
    // factors so far, so the matrix is power x. `gram` is the matrix times its transpose; the iteration turns it into factor gram factorᵀ.
    // `factor` is symmetric and, as a polynomial in gram, commutes with gram. So the new gram is computed as factor (factor gram).
    const uint32_t steps = static_cast<uint32_t>(settings.more[NS_STEPS]);
    for (uint32_t step = 0; step < steps; ++step) {
        product(side, side, side, elements_of(gram), elements_of(gram), [&](uint32_t i, uint32_t j, float sum) {
            const uint64_t index = static_cast<uint64_t>(i) * side + j;
            factor[index] = (i == j ? a : 0.0f) + b * gram[index] + c * sum;
        });
        product(side, side, side, elements_of(factor), elements_of(power), store_to(spare));
        float *const old_power = power;
        power = spare;
        spare = old_power;
        product(side, side, side, elements_of(factor), elements_of(gram), store_to(spare));
        product(side, side, side, elements_of(factor), elements_of(spare), store_to(gram));
    }
    // rust/nn/src/optim/muon.rs says where the factor 0.2 comes from (`match_rms_adamw`).
    const double ratio = settings.more[MATCHES_ADAMW] != 0.0 ? 0.2 * sqrt(static_cast<double>(max(height, width)))
                                                       : sqrt(fmax(static_cast<double>(height) / width, 1.0));
    const float decay = static_cast<float>(1.0 - settings.lr * settings.weight_decay), lr = static_cast<float>(settings.lr * ratio);
    product(side, length, side, elements_of(power), x, [&](uint32_t i, uint32_t j, float sum) {
        const uint64_t index = index_of(i, j);
        elements.set(index, elements.param(index) * decay - lr * sum);
    });
    for_each(count, [&](uint64_t i) { elements.clear(i); });
}

