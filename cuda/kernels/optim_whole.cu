// Kernels of the optimizers whose update of one element depends on other elements of the same variable. include/optim_whole has the
// optimizers' arithmetic.
#include "optim_whole/factored.cuh"
#include "optim_whole/muon.cuh"
#include "optim_whole/prodigy.cuh"
#include "optim_whole/schedule_free.cuh"

// Begins a kernel over whole variables: defines `variable`, `elements` and `step` for this block's variable. G is the type of the
// gradients, C the type of the 16-bit copy of the parameters. In a skipped step (the gradients are non-finite), the macro returns from the
// kernel; before that, it sets the variable's gradients to 0 if bit 0 of `flags` is set.
#define WHOLE_VARIABLE(G, C)                                                                                           \
    const Whole &variable = variables[blockIdx.x];                                                                     \
    const WholeStep step{settings[variable.group], coefficients[variable.group], shared};                              \
    const Elements<G, C> elements(variable, step.coefficients.gain, flags & 1u);                                       \
    if (step.coefficients.skip) {                                                                                      \
        if (flags & 1u) for_each(variable.count, [&](uint64_t i) { static_cast<G *>(variable.grads)[i] = narrow<G>(0.0f); }); \
        return;                                                                                                        \
    }

// <optimizer>_<step or observe>_<dtype of the gradients>_<dtype of the copy>, for f32_bf16, f32_f16, bf16_bf16, f16_f16. The copy is the
// 16-bit copy of the parameters. All kernels have the same arguments and call BODY(elements, step, states).
//   variables [count]; settings, coefficients: an entry for each `group` of the variables; shared: numbers of the optimizer in
//   global memory (see prodigy_estimate), or null;
//   flags: bit 0 is set if the kernel must set the gradients to 0 after their last use, bit 1 in this kernel's first launch of a step, and
//   bit 2 in its last launch of a step;
//   state1 to state5: f32, zeros before the first step; a variable's values begin at the indices in the variable's `states`; null for a
//   state that the optimizer does not have.
// Grid: the number of variables; block: 512; no dynamic shared memory.
#define WHOLE_ARGUMENTS                                                                                                \
    const Whole *variables, uint32_t count, const Settings *settings, const Coefficients *coefficients, double *shared,   \
        uint32_t flags, float *state1, float *state2, float *state3, float *state4, float *state5
#define DEFINE_WHOLE(NAME, BODY, suffix, G, C)                                                                         \
    extern "C" __global__ void __launch_bounds__(WHOLE_THREADS) NAME##_##suffix(WHOLE_ARGUMENTS) {                     \
        follow();                                                                                                      \
        WHOLE_VARIABLE(G, C)                                                                                           \
        float *const states[5] = {state1, state2, state3, state4, state5};                                             \
        BODY(elements, step, states);                                                                                  \
    }
#define DEFINE_STEPS(suffix, G, C)                                                                                     \
    DEFINE_WHOLE(adafactor_step, adafactor, suffix, G, C)                                                              \
    DEFINE_WHOLE(came_step, came, suffix, G, C)                                                                        \
    DEFINE_WHOLE(muon_step, muon, suffix, G, C)                                                                        \
    DEFINE_WHOLE(schedule_free_step, schedule_free, suffix, G, C)                                                      \
    DEFINE_WHOLE(prodigy_observe, prodigy_observe, suffix, G, C)                                                       \
    DEFINE_WHOLE(prodigy_step, prodigy_apply, suffix, G, C)
FOR_EACH_GRADIENT_AND_COPY(DEFINE_STEPS)

// Adds the sums that prodigy_observe wrote for `count` variables to the sums of earlier launches in the same step. The last launch of a
// step computes Prodigy's estimate of the step size d from these sums.
//   The arguments are those of WHOLE_ARGUMENTS; shared f64 [7] has the numbers of `ProdigyShared` (optim_whole/prodigy.cuh).
// Grid: 1; block: 512; no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(WHOLE_THREADS, 1) prodigy_estimate(WHOLE_ARGUMENTS) {
    follow();
    // A step is skipped for all groups or for none.
    if (coefficients[variables[0].group].skip) return;
    // The two sums of variable k.
    const auto sums = [&](uint64_t k) { return reinterpret_cast<const double *>(variables[k].scratch); };
    const double progress = sum_over(count, [&](uint64_t k) { return sums(k)[0]; });
    const double distance = sum_over(count, [&](uint64_t k) { return sums(k)[1]; });
    if (threadIdx.x != 0) return;
    // `prodigy_rate` is 0 for the groups with a learning rate of 0, and the same number for all other groups.
    double rate = 0.0;
    for (uint32_t k = 0; k < count && rate == 0.0; ++k) rate = prodigy_rate(settings[variables[k].group], shared);
    const bool is_first = flags & 2u, is_last = flags & 4u;
    const double all_progress = progress + (is_first ? 0.0 : shared[PROGRESS]);
    const double all_distance = distance + (is_first ? 0.0 : shared[DISTANCE]);
    // A rate other than 0, if any group of this launch or of the earlier ones has one.
    const double any_rate = (is_first || rate != 0.0) ? rate : shared[RATE];
    shared[PROGRESS] = all_progress;
    shared[DISTANCE] = all_distance;
    // The step's rate; prodigy_step takes no step if it is 0.
    shared[RATE] = any_rate;
    if (!is_last) return;
    // Without a distance there is nothing to estimate d from: d stays, and prodigy_step leaves the parameters as they are.
    if (all_distance == 0.0) {
        shared[RATE] = 0.0;
        return;
    }
    // The entries of `more` are Prodigy's own hyper-parameters; those that are read here are the same in all groups.
    const auto &common = settings[variables[0].group].more;
    const double d0 = common[D0];
    double d = shared[D];
    const double numerator = shared[NUMERATOR] * common[BETA3] + d / d0 * all_progress;
    const double estimate = common[D_COEF] * numerator / all_distance;
    if (d == d0) d = fmax(d, estimate);
    shared[D_MAX] = fmax(shared[D_MAX], estimate);
    shared[D] = fmin(shared[D_MAX], d * common[GROWTH_RATE]);
    shared[NUMERATOR] = numerator;
    shared[STEPS] += 1.0;
}
