// Schedule-free AdamW; see rust/nn/src/optim/schedule_free.rs.
#pragma once

#include "elements.cuh"

// The parameters are y = beta1 * average + (1 - beta1) * z, where z are the iterates and the average is over all steps' iterates. The first
// step starts from z = y. `Settings::more` has warmup_steps, r and weight_lr_power. Four of the `states` are used: z, the second moment,
// the sum of the steps' weights in the average, and the largest learning rate so far. The last two have one number each.
// `elements.state` takes a state's buffer and number, and returns where the variable's values begin. `elements.clear` clears a gradient if
// the step is to clear gradients.
template <typename G, typename C>
static __device__ __forceinline__ void schedule_free(const Elements<G, C> &elements, const WholeStep &by, float *const (&states)[5]) {
    const Settings &settings = by.settings;
    float *const z = elements.state(states[0], 0), *const square = elements.state(states[1], 1);
    float *const weight_sum = elements.state(states[2], 2), *const lr_max = elements.state(states[3], 3);
    const double step = static_cast<double>(settings.step), warmup = settings.more[0];
    const double lr = settings.lr * (step <= warmup ? step / warmup : 1.0);
    const float largest = static_cast<float>(fmax(static_cast<double>(*lr_max), lr));
    const double weight = pow(step, settings.more[1]) * pow(static_cast<double>(largest), settings.more[2]);
    const double sum = *weight_sum + weight, share = sum == 0.0 ? 0.0 : weight / sum;
    // All threads have read both numbers before one thread replaces them.
    __syncthreads();
    if (threadIdx.x == 0) {
        *lr_max = largest;
        *weight_sum = static_cast<float>(sum);
    }
    // The square root of the second moment's bias correction.
    const float root = static_cast<float>(sqrt(1.0 - pow(settings.beta2, step)));
    const float beta2 = static_cast<float>(settings.beta2), gain2 = static_cast<float>(1.0 - settings.beta2);
    const float eps = static_cast<float>(settings.eps), decay = static_cast<float>(settings.weight_decay);
    const float share_of_z = static_cast<float>(share), step_z = static_cast<float>(lr);
    // With z' = z - lr * direction and average' = average + share * (z' - average), the new parameters are
    // y' = y + share * (z - y) + step_y * direction.
    const float step_y = static_cast<float>(lr * (settings.beta1 * (1.0 - share) - 1.0));
    for_each(elements.variable.count, [&](uint64_t i) {
        const float y = elements.param(i), g = elements.grad(i);
        const float iterate = settings.step == 1 ? y : z[i];
        square[i] = square[i] * beta2 + gain2 * g * g;
        const float direction = g / (sqrtf(square[i]) / root + eps) + decay * y;
        elements.set(i, y + share_of_z * (iterate - y) + step_y * direction);
        elements.clear(i);
        z[i] = iterate - step_z * direction;
    });
}

