"""Training objectives: noising, targets and losses of diffusion and flow models.

A step of training a diffusion model (SDXL)::

    schedule = NoiseSchedule()                        # SDXL's; .from_pretrained(folder)
    objective = DiffusionObjective(schedule, min_snr_gamma=5.0, device="cuda")
    noised = objective.noise(latents)                 # draws from tc's generator; (B, 4, h, w)
    prediction = unet(noised.sample, noised.timesteps, text, text_embeds=..., time_ids=...)
    loss = objective.loss(prediction, noised, mask=mask, weights=weights)

`objective.noise(latents, samples, seed)` takes the numbers of the samples in the run; a sample's
number and the seed determine its noise and timestep.

A mask (B, 1, h, w) weighs the latent positions; `loss` divides each example's mask by the mask's
mean. `weights` (B,) weighs examples. For a validation loss,
`objective.validation_noise(latents, examples)` gives example number `n` the same noise and timestep
every time, without using tc's generator.

For flow models, `FlowMatching` adds the noise.
"""

from trainable_candle._core import (
    DiffusionObjective,
    FlowMatching,
    NoisedLatents,
    NoiseSchedule,
)

__all__ = ["DiffusionObjective", "FlowMatching", "NoiseSchedule", "NoisedLatents"]
