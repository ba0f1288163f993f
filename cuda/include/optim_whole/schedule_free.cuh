// Schedule-free AdamW; see rust/nn/src/optim/schedule_free.rs.
#pragma once

#include "elements.cuh"

// The parameters are y = beta1 * average + (1 - beta1) * z, where z are the iterates and the average is over all steps' iterates. The first
// step starts from z = y. `Settings::more` has warmup_steps, r and weight_lr_power. There are four states: z, the second moment, the sum of
// the steps' weights in the average, and the largest learning rate so far. The last two have one number each.
template <typename G, typename C>
static __device__ __forceinline__ void schedule_free(const Elements<G, C> &of, const WholeStep &by, float *const (&states)[5]) {
    const Settings &at = by.at;
    float *const z = of.state(states[0], 0), *const square = of.state(states[1], 1);
    float *const weight_sum = of.state(states[2], 2), *const lr_max = of.state(states[3], 3);
    const double step = static_cast<double>(at.step), warmup = at.more[0];
    const double lr = at.lr * (step <= warmup ? step / warmup : 1.0);
    const float largest = static_cast<float>(fmax(static_cast<double>(*lr_max), lr));
    const double weight = pow(step, at.more[1]) * pow(static_cast<double>(largest), at.more[2]);
    const double sum = *weight_sum + weight, share = sum == 0.0 ? 0.0 : weight / sum;
    // All threads have read both numbers before one thread replaces them.
    __syncthreads();
    if (threadIdx.x == 0) {
        *lr_max = largest;
        *weight_sum = static_cast<float>(sum);
    }
    const float root = static_cast<float>(sqrt(1.0 - pow(at.beta2, step)));
    const float kept = static_cast<float>(at.beta2), gained = static_cast<float>(1.0 - at.beta2);
    const float eps = static_cast<float>(at.eps), decay = static_cast<float>(at.weight_decay);
    const float share_of_z = static_cast<float>(share), step_z = static_cast<float>(lr);
    const float step_y = static_cast<float>(lr * (at.beta1 * (1.0 - share) - 1.0));
    for_each(of.of.count, [&](uint64_t i) {
        const float y = of.param(i), g = of.grad(i);
        const float from = at.step == 1 ? y : z[i];
        square[i] = square[i] * kept + gained * g * g;
        const float direction = g / (sqrtf(square[i]) / root + eps) + decay * y;
        of.set(i, y + share_of_z * (from - y) + step_y * direction);
        of.clear(i);
        z[i] = from - step_z * direction;
    });
}

