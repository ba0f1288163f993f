// Muon. `orthogonalize` in rust/nn/src/optim/muon.rs explains why the iteration needs only small square matrices.
#pragma once

#include "elements.cuh"

// Indices of `Settings::more`: momentum, the three coefficients of the Newton-Schulz iteration, the minimum norm by which a direction is
// divided, the number of iterations, whether updates are scaled to suit learning rates of AdamW (0 or 1).
enum MuonSetting { MOMENTUM, COEFFICIENT_A, COEFFICIENT_B, COEFFICIENT_C, LEAST_NORM, NS_STEPS, MATCHES_ADAMW };

constexpr int TILE = 16;

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
static __device__ __forceinline__ void muon_vector(const Elements<G, C> &of, const Settings &at, float *mean, float *square) {
    const double step = static_cast<double>(at.step);
    const float step_size = static_cast<float>(at.lr / (1.0 - pow(at.beta1, step)));
    const float root = static_cast<float>(sqrt(1.0 - pow(at.beta2, step)));
    const float gain1 = static_cast<float>(1.0 - at.beta1), beta2 = static_cast<float>(at.beta2);
    const float gain2 = static_cast<float>(1.0 - at.beta2), eps = static_cast<float>(at.eps);
    const float kept = static_cast<float>(1.0 - at.lr * at.weight_decay);
    for_each(of.of.count, [&](uint64_t i) {
        const float g = of.grad(i);
        mean[i] += gain1 * (g - mean[i]);
        square[i] = square[i] * beta2 + gain2 * g * g;
        of.set(i, of.param(i) * kept - step_size * mean[i] / (sqrtf(square[i]) / root + eps));
        of.clear(i);
    });
}

// The step of a variable. A variable of two or more dimensions is a matrix of `height` rows, the size of the first dimension. It has one
// state, `momentum_buffer`, and scratch for four square matrices of side min(height, width). A vector has two states and no scratch; AdamW
// updates it.
template <typename G, typename C>
static __device__ __forceinline__ void muon(const Elements<G, C> &of, const WholeStep &by, float *const (&states)[5]) {
    const Settings &at = by.at;
    if (states[1] != nullptr) return muon_vector(of, at, of.state(states[0], 0), of.state(states[1], 1));
    const uint64_t count = of.of.count;
    const uint32_t height = of.of.first, width = static_cast<uint32_t>(count / height);
    float *const buffer = of.state(states[0], 0);
    const float momentum = static_cast<float>(at.more[MOMENTUM]), gain = static_cast<float>(1.0 - at.more[MOMENTUM]);
    for_each(count, [&](uint64_t i) { buffer[i] += gain * (of.grad(i) - buffer[i]); });
    const auto direction = [&](uint64_t i) {
        if (!at.nesterov) return buffer[i];
        const float g = of.grad(i);
        return g + momentum * (buffer[i] - g);
    };
    const double squares = sum_over(count, [&](uint64_t i) { return static_cast<double>(direction(i)) * direction(i); });
    const float scale = static_cast<float>(1.0 / fmax(sqrt(squares), at.more[LEAST_NORM]));

    // x is the direction divided by its norm, and transposed if it has more rows than columns: a matrix (side, length).
    const bool is_tall = height > width;
    const uint32_t side = is_tall ? width : height, length = is_tall ? height : width;
    const auto place = [&](uint32_t i, uint32_t j) {
        return is_tall ? static_cast<uint64_t>(j) * width + i : static_cast<uint64_t>(i) * width + j;
    };
    const uint64_t area = static_cast<uint64_t>(side) * side;
    float *gram = of.of.scratch, *factor = gram + area, *power = factor + area, *spare = power + area;
    const auto x = [&](uint32_t i, uint32_t j) { return scale * direction(place(i, j)); };
    const auto at_of = [&](const float *matrix) {
        return [=](uint32_t i, uint32_t j) { return matrix[static_cast<uint64_t>(i) * side + j]; };
    };
    const auto into = [&](float *matrix) {
        return [=](uint32_t i, uint32_t j, float sum) { matrix[static_cast<uint64_t>(i) * side + j] = sum; };
    };
    product(side, side, length, x, [&](uint32_t k, uint32_t j) { return x(j, k); }, into(gram));
    for_each(area, [&](uint64_t i) { power[i] = i % (side + 1) == 0 ? 1.0f : 0.0f; });
    const float a = static_cast<float>(at.more[COEFFICIENT_A]), b = static_cast<float>(at.more[COEFFICIENT_B]);
    const float c = static_cast<float>(at.more[COEFFICIENT_C]);
    // Each iteration multiplies the matrix from the left by factor = a I + b gram + c gram². `power` is the product of all factors so far,
    // so the matrix is power x. `gram` is the matrix times its transpose; the iteration turns it into factor gram factor.
    const uint32_t steps = static_cast<uint32_t>(at.more[NS_STEPS]);
    for (uint32_t step = 0; step < steps; ++step) {
        product(side, side, side, at_of(gram), at_of(gram), [&](uint32_t i, uint32_t j, float sum) {
            const uint64_t index = static_cast<uint64_t>(i) * side + j;
            factor[index] = (i == j ? a : 0.0f) + b * gram[index] + c * sum;
        });
        product(side, side, side, at_of(factor), at_of(power), into(spare));
        float *const old_power = power;
        power = spare;
        spare = old_power;
        product(side, side, side, at_of(factor), at_of(gram), into(spare));
        product(side, side, side, at_of(factor), at_of(spare), into(gram));
    }
    const double ratio = at.more[MATCHES_ADAMW] != 0.0 ? 0.2 * sqrt(static_cast<double>(max(height, width)))
                                                       : sqrt(fmax(static_cast<double>(height) / width, 1.0));
    const float kept = static_cast<float>(1.0 - at.lr * at.weight_decay), lr = static_cast<float>(at.lr * ratio);
    product(side, length, side, at_of(power), x, [&](uint32_t i, uint32_t j, float sum) {
        const uint64_t index = place(i, j);
        of.set(index, of.param(index) * kept - lr * sum);
    });
    for_each(count, [&](uint64_t i) { of.clear(i); });
}

