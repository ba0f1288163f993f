"""Prodigy's trajectories over two groups of parameters, by its authors' implementation.

    pip install torch==2.11.0 prodigyopt==1.1.2 safetensors
    python make_prodigy.py prodigyopt.safetensors

`pN` is parameter N before the first step, and `gradN.I` its gradient for step I, counted from 0.
After the last step, `CASE.pN` is the parameter and `CASE.N.STATE` is one of its states. `CASE.d.I`
is Prodigy's estimate d after step I. Each case is computed in f32, and as `CASE.f64` in f64.
"""

import sys

import torch
from prodigyopt import Prodigy
from safetensors.torch import save_file

STEPS = 12
CASES = {
    "default": {},
    "decay": {
        "lr": 0.5,
        "betas": (0.8, 0.99),
        "eps": 1e-6,
        "weight_decay": 0.1,
        "use_bias_correction": True,
        "safeguard_warmup": True,
        "d0": 1e-4,
        "d_coef": 8.0,
    },
    # The weight decay is added to the gradients (`decouple` is False).
    "coupled": {
        "betas": (0.0, 0.99),
        "beta3": 0.9,
        "weight_decay": 0.1,
        "decouple": False,
        "d0": 1e-3,
        "d_coef": 2.0,
        "growth_rate": 1.5,
        "slice_p": 3,
    },
}


def main(path: str) -> None:
    """Write all cases to `path`."""
    torch.manual_seed(20261121)
    tensors = {"p0": torch.randn(13, 11), "p1": torch.randn(40)}
    # Gradients that mostly agree from step to step, so that the estimate grows.
    directions = [torch.randn_like(tensors["p0"]), torch.randn_like(tensors["p1"])]
    for step in range(STEPS):
        for index, direction in enumerate(directions):
            tensors[f"grad{index}.{step}"] = direction + 0.3 * torch.randn_like(direction)
    for dtype in (torch.float32, torch.float64):
        for case, arguments in CASES.items():
            name = case if dtype == torch.float32 else f"{case}.f64"
            params = [torch.nn.Parameter(tensors[f"p{i}"].to(dtype, copy=True)) for i in range(2)]
            groups = [{"params": [params[0]]}, {"params": [params[1]], "weight_decay": 0.0}]
            opt = Prodigy(groups, **arguments)
            for step in range(STEPS):
                for index, param in enumerate(params):
                    param.grad = tensors[f"grad{index}.{step}"].to(dtype, copy=True)
                opt.step()
                d = opt.param_groups[0]["d"]  # equal in both groups
                tensors[f"{name}.d.{step}"] = torch.tensor([d], dtype=torch.float64)
            for index, param in enumerate(params):
                tensors[f"{name}.p{index}"] = param.detach()
                for key, value in opt.state[param].items():
                    if key != "step":
                        tensors[f"{name}.{index}.{key}"] = value
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
