"""Training objectives: noising, targets and losses of diffusion and flow models.

A step of training a diffusion model (SDXL)::

    schedule = NoiseSchedule()            # SDXL's; NoiseSchedule.from_pretrained reads another
    objective = DiffusionObjective(schedule, min_snr_gamma=5.0, device="cuda")
    noised = objective.noise(latents)     # draws from tc's generator
    prediction = unet(noised.sample, noised.timesteps, text, text_embeds=..., time_ids=...)
    loss = objective.loss(prediction, noised, mask=mask, weights=weights)

The latents of B examples have the shape (B, 4, h, w). `objective.noise(latents, samples, seed)`
takes the numbers that the run gives to its samples; a sample's number and the seed determine its
noise and timestep.

`mask`, of shape (B, 1, h, w), has the weights of the latents' positions; `loss` divides an
example's mask by its mean. `weights`, of shape (B,), has the weights of the examples.

For a validation loss, `objective.validation_noise(latents, examples)` gives each example the same
noise and timestep in every call. They depend on its number in `examples`, not on tc's generator.

For flow models, `FlowMatching` adds the noise and returns the target.
"""

from trainable_candle._core import (
    DiffusionObjective,
    FlowMatching,
    NoisedLatents,
    NoiseSchedule,
)

__all__ = ["DiffusionObjective", "FlowMatching", "NoiseSchedule", "NoisedLatents"]
