"""Results of diffusers' schedulers: noise schedules, Euler and DPM++ 2M on a toy model.

pip install torch==2.11.0 diffusers==0.42.1 safetensors
python make_diffusers.py diffusers.safetensors

The script makes the schedulers compute in f64: it replaces `float32` of torch and numpy by
`float64`. In f32, Euler would lose digits: with a signal-to-noise ratio of 0 at the last timestep,
where sampling starts, its first step subtracts numbers near 10,000 that differ by 50. Noise and
conditions are f32 numbers.
`RUN.samples` has the sample before the first step and after each step.
"""

import json
import sys

import numpy as np
import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler
from safetensors.torch import save_file

SDXL = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "num_train_timesteps": 1000,
    "timestep_spacing": "leading",
    "steps_offset": 1,
}
ZERO_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
SCHEDULES = {
    "sdxl": {},
    "zero_snr": {"rescale_betas_zero_snr": True},
    "linear": {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "short": {"num_train_timesteps": 100, "beta_end": 0.02},
}
V_PREDICTION = {"prediction_type": "v_prediction"}
# A run's kind of sampler, number of steps, and settings that differ from those of SDXL.
RUNS = {
    "euler": ("euler", 20, {}),
    "euler_v": ("euler", 20, V_PREDICTION),
    "euler_trailing": ("euler", 7, {"timestep_spacing": "trailing"}),
    "euler_linspace": ("euler", 9, {"timestep_spacing": "linspace"}),
    "euler_zero_snr": ("euler", 12, V_PREDICTION | ZERO_SNR),
    "euler_karras": ("euler", 10, {"use_karras_sigmas": True}),
    "dpmpp_2m": ("dpmpp_2m", 20, {}),
    "dpmpp_2m_v": ("dpmpp_2m", 8, V_PREDICTION),
    "dpmpp_2m_trailing": ("dpmpp_2m", 7, {"timestep_spacing": "trailing"}),
    "dpmpp_2m_linspace": ("dpmpp_2m", 9, {"timestep_spacing": "linspace"}),
    "dpmpp_2m_zero_snr": ("dpmpp_2m", 12, V_PREDICTION | ZERO_SNR),
    "dpmpp_2m_karras": ("dpmpp_2m", 10, {"use_karras_sigmas": True}),
    "dpmpp_2m_one": ("dpmpp_2m", 1, {}),
}
GUIDANCE = 3.5


def model(x: torch.Tensor, timestep: float, condition: torch.Tensor) -> torch.Tensor:
    return 0.5 * x + 0.4 * torch.tanh(x + condition) * (timestep / 1000)


def main() -> None:
    torch.manual_seed(20261121)
    noise = torch.randn(2, 4, 2, 3)
    negative, positive = torch.randn(2, 1, 4, 1, 1)
    found = {"noise": noise, "negative": negative, "positive": positive}
    # `negative` and `positive` share memory, which safetensors rejects.
    found = {name: value.clone() for name, value in found.items()}
    torch.float32, np.float32 = torch.float64, np.float64
    torch.set_default_dtype(torch.float64)
    # In the order of `found`.
    noise, negative, positive = (value.double() for value in found.values())
    for name, changes in SCHEDULES.items():
        scheduler = DDPMScheduler(**(SDXL | changes))
        found[f"schedule.{name}.alphas_cumprod"] = scheduler.alphas_cumprod
    for name, (kind, steps, changes) in RUNS.items():
        kinds = {"euler": EulerDiscreteScheduler, "dpmpp_2m": DPMSolverMultistepScheduler}
        scheduler = kinds[kind](**(SDXL | changes))
        scheduler.set_timesteps(steps)
        x = noise * scheduler.init_noise_sigma
        xs = [x]
        for timestep in scheduler.timesteps:
            scaled = scheduler.scale_model_input(x, timestep)
            # The predictions for the negative and the positive condition.
            away, towards = (model(scaled, timestep.item(), c) for c in (negative, positive))
            x = scheduler.step(away + GUIDANCE * (towards - away), timestep, x).prev_sample
            xs.append(x)
        found[f"{name}.timesteps"] = scheduler.timesteps.double()
        found[f"{name}.sigmas"] = scheduler.sigmas
        found[f"{name}.samples"] = torch.stack(xs)
    runs = {
        name: {"kind": kind, "steps": steps, "settings": SDXL | changes}
        for name, (kind, steps, changes) in RUNS.items()
    }
    schedules = {name: SDXL | changes for name, changes in SCHEDULES.items()}
    metadata = {"scale": GUIDANCE, "runs": runs, "schedules": schedules}
    found = {name: value.contiguous() for name, value in found.items()}
    save_file(found, sys.argv[1], {name: json.dumps(value) for name, value in metadata.items()})


if __name__ == "__main__":
    main()
