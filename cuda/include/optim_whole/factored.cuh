// Adafactor and CAME: their states have the second moments of a matrix's rows and columns, from which they compute the second moments of
// its elements. See rust/nn/src/optim/adafactor.rs and came.rs. One block of WHOLE_THREADS threads computes the step of one variable.
#pragma once

#include "elements.cuh"

// A variable as a sequence of matrices of its last two dimensions. The rows of all matrices are numbered together, and so are the columns.
// The three functions return the row and the column of an element, and the matrix of a row.
struct Matrices {
    uint32_t height, width;
    uint64_t number, rows, columns; // how many matrices there are; how many rows and columns they have together

    __device__ __forceinline__ explicit Matrices(const Whole &variable) : height(variable.rows), width(variable.columns) {
        number = variable.count / (static_cast<uint64_t>(height) * width);
        rows = number * height;
        columns = number * width;
    }

    __device__ __forceinline__ uint64_t row(uint64_t element) const { return element / width; }
    __device__ __forceinline__ uint64_t column(uint64_t element) const {
        return row(element) / height * width + element % width;
    }
    __device__ __forceinline__ uint64_t matrix(uint64_t row) const { return row / height; }
};

// Calls row_of(row, mean of value(i) over the row) for every row, and column_of(column, mean of value(i) over the column)
// for every column. `row_of` writes to `rows` [number of rows]. Afterwards sets `mean_rows` [number of matrices] to the means of `rows`
// over the rows of each matrix.
template <typename V, typename R, typename S>
static __device__ __forceinline__ void
moments(const Matrices &in, V value, R row_of, S column_of, const float *rows, float *mean_rows) {
    const uint32_t lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    for (uint64_t row = threadIdx.x / WARP; row < in.rows; row += warps) {
        double sum = 0.0;
        for (uint32_t j = lane; j < in.width; j += WARP) sum += value(row * in.width + j);
        sum = warp_sum(sum);
        if (lane == 0) row_of(row, sum / in.width);
    }
    if (in.number == 1 && in.width <= WHOLE_THREADS / 2) {
        // A column of a single narrow matrix is shared by `sharers` threads, because otherwise most threads would have no column. Thread
        // k * width + column sums the rows k, k + sharers, ... of the column.
        __shared__ double parts[WHOLE_THREADS];
        const uint32_t sharers = WHOLE_THREADS / in.width, column = threadIdx.x % in.width;
        double sum = 0.0;
        for (uint32_t i = threadIdx.x / in.width; i < in.height && threadIdx.x < sharers * in.width; i += sharers) {
            sum += value(static_cast<uint64_t>(i) * in.width + column);
        }
        parts[threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.x < in.width) {
            for (uint32_t k = 1; k < sharers; ++k) sum += parts[k * in.width + column];
            column_of(column, sum / in.height);
        }
    } else {
        for (uint64_t column = threadIdx.x; column < in.columns; column += blockDim.x) {
            const uint64_t start = column / in.width * in.height * in.width + column % in.width;
            double sum = 0.0;
            for (uint32_t i = 0; i < in.height; ++i) sum += value(start + static_cast<uint64_t>(i) * in.width);
            column_of(column, sum / in.height);
        }
    }
    __syncthreads();
    for (uint64_t matrix = threadIdx.x / WARP; matrix < in.number; matrix += warps) {
        double sum = 0.0;
        for (uint32_t i = lane; i < in.height; i += WARP) sum += rows[matrix * in.height + i];
        sum = warp_sum(sum);
        if (lane == 0) mean_rows[matrix] = static_cast<float>(sum / in.height);
    }
    __syncthreads();
}

// a + weight * (b - a), written so that it is exactly `a` for a weight of 0 and exactly `b` for a weight of 1.
static __device__ __forceinline__ float lerp(float a, float b, float weight) {
    return weight < 0.5f ? a + weight * (b - a) : b - (1.0f - weight) * (b - a);
}

// In the steps below, `by` has the hyper-parameters; `states` has the buffers of states, null from the variable's number of states on.
// `elements.state(buffer, n)` returns the variable's values of its state number n, and `elements.clear` sets a gradient to 0 if the step is
// to clear gradients.

// The step of torch.optim.Adafactor. `Settings::more` has beta2_decay; eps, the minimum of the root of a second moment; the minimum of the
// parameters' root mean square; and d, the clipping threshold.
//   A vector has one state, the second moments of its elements. A variable of two or more dimensions is a sequence of matrices, and has a
//   state for their rows and one for their columns. scratch: f32 [number of matrices].
template <typename G, typename C>
static __device__ __forceinline__ void adafactor(const Elements<G, C> &elements, const WholeStep &by, float *const (&states)[5]) {
    const Settings &settings = by.settings;
    const uint64_t count = elements.variable.count;
    const double step = static_cast<double>(settings.step), eps = settings.more[1];
    // The weight of the new value in a second moment; beta2_decay is negative.
    const float weight = static_cast<float>(pow(step, settings.more[0]));
    const float least_moment = static_cast<float>(eps * eps);
    const double squares = sum_over(count, [&](uint64_t i) { return static_cast<double>(elements.param(i)) * elements.param(i); });
    const double param_rms = fmax(sqrt(squares / count), settings.more[2]);
    const bool is_matrix = states[1] != nullptr;
    // The moments of rows; of a vector, the moments of its elements.
    float *const rows = elements.state(states[0], 0);
    float *const columns = is_matrix ? elements.state(states[1], 1) : nullptr;
    const Matrices in(elements.variable);
    float *const mean_rows = elements.variable.scratch;
    if (is_matrix) {
        const auto square = [&](uint64_t i) { return static_cast<double>(elements.grad(i)) * elements.grad(i); };
        const auto row_of = [&](uint64_t row, double mean) { rows[row] = lerp(rows[row], static_cast<float>(mean), weight); };
        const auto column_of = [&](uint64_t column, double mean) {
            columns[column] = lerp(columns[column], static_cast<float>(mean), weight);
        };
        moments(in, square, row_of, column_of, rows, mean_rows);
    } else {
        for_each(count, [&](uint64_t i) { rows[i] = lerp(rows[i], elements.grad(i) * elements.grad(i), weight); });
    }
    const auto direction = [&](uint64_t i) {
        float moment = 0.0f;
        if (is_matrix) {
            const uint64_t row = in.row(i);
            moment = rows[row] * columns[in.column(i)] / fmaxf(mean_rows[in.matrix(row)], static_cast<float>(eps));
        } else {
            moment = rows[i];
        }
        return elements.grad(i) / sqrtf(fmaxf(moment, least_moment));
    };
    const double sum = sum_over(count, [&](uint64_t i) { return static_cast<double>(direction(i)) * direction(i); });
    const double clip = fmax(sqrt(sum / count) / settings.more[3], 1.0);
    const float decay = static_cast<float>(1.0 - settings.lr * settings.weight_decay);
    const float step_size = static_cast<float>(param_rms * fmin(settings.lr, 1.0 / sqrt(step)) / clip);
    for_each(count, [&](uint64_t i) {
        elements.set(i, elements.param(i) * decay - step_size * direction(i));
        elements.clear(i);
    });
}

// The step of came_pytorch.CAME. `Settings::more` has the second eps, clip_threshold and the third beta; `Settings::eps` is the first eps.
//   A vector has two states, the moments `exp_avg` and `exp_avg_sq`. A sequence of matrices has five: exp_avg; the second moments of rows
//   and of columns; and the instabilities of rows and of columns, which reduce the step: they are mean squares of the difference between an
//   update and its average.
//   scratch: f32 [2][number of matrices].
template <typename G, typename C>
static __device__ __forceinline__ void came(const Elements<G, C> &elements, const WholeStep &by, float *const (&states)[5]) {
    const Settings &settings = by.settings;
    const uint64_t count = elements.variable.count;
    const bool is_matrix = states[2] != nullptr;
    const Matrices in(elements.variable);
    float *const exp_avg = elements.state(states[0], 0);
    // The moments of rows; of a vector, the moments of its elements (`exp_avg_sq`).
    float *const rows = elements.state(states[1], 1);
    float *const columns = is_matrix ? elements.state(states[2], 2) : nullptr;
    float *const mean_rows = elements.variable.scratch;
    // The weights of an average's old value and of the new value.
    const auto weights_of = [](double beta) { return make_float2(static_cast<float>(beta), static_cast<float>(1.0 - beta)); };
    const float2 first = weights_of(settings.beta1), second = weights_of(settings.beta2), third = weights_of(settings.more[2]);
    const float eps1 = static_cast<float>(settings.eps), eps2 = static_cast<float>(settings.more[0]);
    const auto update_average = [](float &average, double value, float2 weights) {
        average = average * weights.x + weights.y * static_cast<float>(value);
    };
    const auto square = [&](uint64_t i) { return elements.grad(i) * elements.grad(i) + eps1; };
    if (is_matrix) {
        const auto row_of = [&](uint64_t row, double x) { update_average(rows[row], x, second); };
        const auto column_of = [&](uint64_t column, double x) { update_average(columns[column], x, second); };
        moments(in, square, row_of, column_of, rows, mean_rows);
    } else {
        for_each(count, [&](uint64_t i) { update_average(rows[i], square(i), second); });
    }
    // The update before clipping.
    const auto unclipped = [&](uint64_t i) {
        if (!is_matrix) return elements.grad(i) / sqrtf(rows[i]);
        const uint64_t row = in.row(i);
        return elements.grad(i) * (1.0f / sqrtf(rows[row] / mean_rows[in.matrix(row)])) * (1.0f / sqrtf(columns[in.column(i)]));
    };
    const double sum = sum_over(count, [&](uint64_t i) { return static_cast<double>(unclipped(i)) * unclipped(i); });
    const float clip = static_cast<float>(1.0 / fmax(sqrt(sum / count) / settings.more[1], 1.0));
    for_each(count, [&](uint64_t i) { update_average(exp_avg[i], unclipped(i) * clip, first); });
    const float decay_factor = static_cast<float>(1.0 - settings.lr * settings.weight_decay), lr = static_cast<float>(settings.lr);
    if (!is_matrix) {
        for_each(count, [&](uint64_t i) {
            elements.set(i, elements.param(i) * decay_factor - lr * exp_avg[i]);
            elements.clear(i);
        });
        return;
    }
    float *const row_instabilities = elements.state(states[3], 3);
    float *const column_instabilities = elements.state(states[4], 4);
    float *const mean_instabilities = mean_rows + in.number;
    const auto squared_difference = [&](uint64_t i) {
        const float x = unclipped(i) * clip - exp_avg[i];
        return x * x + eps2;
    };
    const auto row_of = [&](uint64_t row, double x) { update_average(row_instabilities[row], x, third); };
    const auto column_of = [&](uint64_t column, double x) { update_average(column_instabilities[column], x, third); };
    moments(in, squared_difference, row_of, column_of, row_instabilities, mean_instabilities);
    for_each(count, [&](uint64_t i) {
        const uint64_t row = in.row(i);
        const float confidence = 1.0f / sqrtf(row_instabilities[row] / mean_instabilities[in.matrix(row)]) *
                                 (1.0f / sqrtf(column_instabilities[in.column(i)]));
        elements.set(i, elements.param(i) * decay_factor - lr * (confidence * exp_avg[i]));
        elements.clear(i);
    });
}

