"""From noise to latents.

One run::

    sampler = Sampler(schedule, steps=25, kind="euler" | "dpmpp_2m", karras_sigmas=False)
    guided = Guided(model, positive={...}, negative={...}, scale=7.0, batched=True)
    x = sampler.init_noise(tc.randn(shape))
    for i, timestep in enumerate(sampler.timesteps):
        x = sampler.step(guided(sampler.scale_input(x, i), timestep), i, x)

`Guided` calls `model(x, timestep, **conditioning)`: `timestep` is a float; conditioning tensors have
the batch first and are, if `batched`, those of the negative and the positive prompt one after the
other, with x repeated alike.
"""
