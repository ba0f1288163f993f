"""What a model is asked to predict, and how far its answer is off.

A diffusion model (SDXL) is trained in four calls::

    schedule = NoiseSchedule()                        # SDXL's; or NoiseSchedule.from_pretrained(folder)
    objective = DiffusionObjective(schedule, min_snr_gamma=5.0, device="cuda")
    noised = objective.noise(latents)                 # draws from tc's generator; (B, 4, h, w)
    prediction = unet(noised.sample, noised.timesteps, text, text_embeds=..., time_ids=...)
    loss = objective.loss(prediction, noised, mask=mask, weights=weights)

The signatures::

    NoiseSchedule(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012,
                  num_train_timesteps=1000, prediction_type="epsilon",
                  rescale_betas_zero_snr=False, timestep_spacing="leading", steps_offset=1)
    NoiseSchedule.from_pretrained(path)               # scheduler_config.json, its folder, or the model's
    schedule.num_train_timesteps: int; .prediction_type: str; .alphas_cumprod: list[float]

    DiffusionObjective(schedule, *, timesteps="uniform" | "logit_normal", logit_mean=0.0,
                       logit_std=1.0, shift=1.0, min_timestep=0, max_timestep=None,
                       min_snr_gamma=None, noise_offset=0.0,
                       loss="mse" | "l1" | "huber" | "smooth_l1", huber_delta=0.1,
                       huber_schedule="constant" | "exponential" | "snr", device="cpu")
    objective.noise(latents) -> NoisedLatents
    objective.noise_at(latents, noise, timesteps) -> NoisedLatents
    objective.validation_noise(latents, examples: list[int], seed=0) -> NoisedLatents
    objective.loss(prediction, noised, mask=None, weights=None) -> Tensor   # one element, f32
    noised.sample, noised.timesteps (B,) i64, noised.target

A mask (B, 1, h, w) weighs the places of each example and is divided by its mean there; `weights`
(B,) weighs examples. `validation_noise` gives example number `n` the same noise and timestep every
time and leaves tc's generator alone.
"""

from trainable_candle._core import FlowMatching

__all__ = ["FlowMatching"]
