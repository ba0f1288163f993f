"""SDXL's noise schedule, and noised latents, velocities and min-SNR weights, all by diffusers.

pip install torch==2.11.0 diffusers==0.42.1 safetensors
python make_diffusers.py diffusers.safetensors

Tables are f64, since f32 loses digits in 1 - alpha where alpha is near 1. diffusers builds them in
`torch.float32`; this script replaces that name by `torch.float64`. Latents and noise are f32.
A time step is an index of the tables, which have 1000 entries.
"""

import sys
from types import SimpleNamespace

import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr
from safetensors.torch import save_file

# The largest signal-to-noise ratio in the min-SNR weights (arXiv:2303.09556).
GAMMA = 5.0


def main() -> None:
    torch.manual_seed(20261121)
    latents, noise = torch.randn(2, 4, 4, 8, 8)  # (4 samples, 4 channels, 8, 8) each
    timesteps = torch.tensor([0, 250, 777, 999])
    float32, torch.float32 = torch.float32, torch.float64
    scheduler = DDPMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, num_train_timesteps=1000
    )
    torch.float32 = float32
    arguments = latents.double(), noise.double(), timesteps
    # `compute_snr` reads only this table of a scheduler. It returns f32.
    snr = compute_snr(
        SimpleNamespace(alphas_cumprod=scheduler.alphas_cumprod), torch.arange(1000)
    ).double()
    found = {
        "x0": latents.contiguous(),
        "noise": noise.contiguous(),
        "timesteps": timesteps,
        "alphas_cumprod": scheduler.alphas_cumprod,
        "ddpm_noised": scheduler.add_noise(*arguments),
        "ddpm_velocity": scheduler.get_velocity(*arguments),
        "min_snr_gamma5_eps_weight": snr.clamp(max=GAMMA) / snr,
        "min_snr_gamma5_v_weight": snr.clamp(max=GAMMA) / (snr + 1),
    }
    save_file(found, sys.argv[1])


if __name__ == "__main__":
    main()
