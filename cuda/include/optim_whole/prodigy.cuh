// The optimizer Prodigy, in three kernels. The first updates the moments of every variable and computes the variable's terms of the two
// sums from which D, the estimate of the step size, is computed. The second (kernels/optim_whole.cu) computes D, and the third updates the
// parameters. See rust/nn/src/optim/prodigy.
//
// In the first and the third, one block of threads handles a variable. `for_each(count, f)` (elements.cuh) spreads the calls f(i),
// i < count, over the threads of the block and then synchronizes them. G is the dtype of the gradients, C that of the 16-bit copy of the
// parameters.
#pragma once

#include "elements.cuh"

// Indices of `Settings::more`: the third beta, d0 (the first estimate), d_coef, growth_rate and slice_p (the sums use every
// slice_p-th element); then, each 0 or 1, whether weight decay is decoupled, whether the rate has Adam's bias correction, and
// safeguard_warmup.
enum ProdigySetting { BETA3, D0, D_COEF, GROWTH_RATE, SLICE, DECOUPLE, CORRECT, SAFEGUARD };

// Indices of `WholeStep::shared`. Kept between steps are the estimate (D), the largest estimate (D_MAX), the numerator of the estimate and
// the number of steps that computed an estimate (STEPS). The other three are those of one step: the two sums over all variables
// (PROGRESS, the rate times sum(g * (start - p)), and DISTANCE, sum(|s|)), and the step size of the parameters (RATE), which is 0 if the
// step leaves the parameters as they are.
enum ProdigyShared { D, D_MAX, NUMERATOR, STEPS, PROGRESS, DISTANCE, RATE };

// The step size of this step: the estimate times the learning rate, with bias correction. Call this before `shared` counts the step and
// gets the new estimate.
static __device__ __forceinline__ double prodigy_rate(const Settings &settings, const double *shared) {
    double correction = 1.0;
    if (settings.more[CORRECT] != 0.0) {
        const double step = shared[STEPS] + 1.0;
        correction = sqrt(1.0 - pow(settings.beta2, step)) / (1.0 - pow(settings.beta1, step));
    }
    return shared[D] * settings.lr * correction;
}

// Updates the moments, and writes the variable's terms of the two sums (PROGRESS, DISTANCE) to its scratch, f64 [2]. `states` are the
// buffers of the states of all variables, of which Prodigy uses four; the fifth is null. s, a decaying sum of the gradients, and `start`,
// the parameters before the first step, have a number for every slice_p-th element; the second moment `square` and the first moment
// `mean` have one for every element. There is no `mean` if the first beta is 0.
template <typename G, typename C>
static __device__ __forceinline__ void prodigy_observe(const Elements<G, C> &elements, const WholeStep &by, float *const (&states)[5]) {
    const Settings &settings = by.settings;
    double *const sums = reinterpret_cast<double *>(elements.variable.scratch);
    const double d = by.shared[D], rate = prodigy_rate(settings, by.shared);
    const float l2 = settings.more[DECOUPLE] != 0.0 ? 0.0f : static_cast<float>(settings.weight_decay);
    // `every` is slice_p, and `sampled` is how many elements the sums use.
    const uint64_t every = static_cast<uint64_t>(settings.more[SLICE]), sampled = (elements.variable.count + every - 1) / every;
    // `state` returns this variable's part of a buffer; its second argument is the index of the state that the buffer holds.
    float *const s = elements.state(states[0], 0), *const start = elements.state(states[1], 1);
    float *const square = elements.state(states[2], 2);
    if (settings.step == 1) for_each(sampled, [&](uint64_t k) { start[k] = elements.param(k * every); });
    // A learning rate of 0 leaves the variable and its moments as they are, and the variable adds nothing to the sums.
    if (settings.lr == 0.0) {
        if (threadIdx.x == 0) sums[0] = sums[1] = 0.0;
        return;
    }
    const float beta3 = static_cast<float>(settings.more[BETA3]);
    // gain1, gain2 and gain3 are the factors of the new gradient in `mean`, `square` and s.
    const float gain3 = static_cast<float>(d / settings.more[D0] * (settings.more[SAFEGUARD] != 0.0 ? d : rate));
    double progress = 0.0, distance = 0.0;
    for (uint64_t k = threadIdx.x; k < sampled; k += blockDim.x) {
        const uint64_t i = k * every;
        const float p = elements.param(i), g = elements.grad(i) + l2 * p;
        progress += g * (start[k] - p);
        s[k] = beta3 * s[k] + gain3 * g;
        distance += fabsf(s[k]);
    }
    __shared__ double warps[WARP];
    progress = block_sum(progress, warps);
    distance = block_sum(distance, warps);
    if (threadIdx.x == 0) {
        sums[0] = rate * progress;
        sums[1] = distance;
    }
    const float beta2 = static_cast<float>(settings.beta2), gain2 = static_cast<float>(d * d * (1.0 - settings.beta2));
    const float beta1 = static_cast<float>(settings.beta1), gain1 = static_cast<float>(d * (1.0 - settings.beta1));
    float *const mean = states[3] == nullptr ? nullptr : elements.state(states[3], 3);
    for_each(elements.variable.count, [&](uint64_t i) {
        const float g = elements.grad(i) + l2 * elements.param(i);
        square[i] = beta2 * square[i] + gain2 * g * g;
        if (mean != nullptr) mean[i] = beta1 * mean[i] + gain1 * g;
    });
}

// Updates the parameters, unless their learning rate or the rate of the step is 0. In all cases, sets the gradients to 0 if the step is
// to clear gradients.
template <typename G, typename C>
static __device__ __forceinline__ void prodigy_apply(const Elements<G, C> &elements, const WholeStep &by, float *const (&states)[5]) {
    const Settings &settings = by.settings;
    if (settings.lr == 0.0 || by.shared[RATE] == 0.0) {
        for_each(elements.variable.count, [&](uint64_t i) { elements.clear(i); });
        return;
    }
    // The second kernel computed the rate from the estimate before this step. `prodigy_rate` would now compute another rate, because
    // `shared` already has the new estimate and counts this step.
    const double rate = by.shared[RATE], d = by.shared[D];
    const bool decouples = settings.more[DECOUPLE] != 0.0;
    const float decay = decouples ? static_cast<float>(settings.weight_decay * rate) : 0.0f;
    const float l2 = decouples ? 0.0f : static_cast<float>(settings.weight_decay);
    const float step_size = static_cast<float>(rate), eps = static_cast<float>(d * settings.eps), scale = static_cast<float>(d);
    const float *const square = elements.state(states[2], 2);
    const float *const mean = states[3] == nullptr ? nullptr : elements.state(states[3], 3);
    for_each(elements.variable.count, [&](uint64_t i) {
        const float p = elements.param(i);
        // With a first beta of 0 there is no mean. As in prodigyopt, d times the gradient takes its place, where d is the new estimate.
        const float direction = mean != nullptr ? mean[i] : scale * (elements.grad(i) + l2 * p);
        elements.set(i, p - decay * p - step_size * direction / (sqrtf(square[i]) + eps));
        elements.clear(i);
    });
}

