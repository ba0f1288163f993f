"""CAME's trajectories by its authors' implementation, in f64.

    pip install torch==2.11.0 came-pytorch==0.1.3 safetensors
    python make_came.py came.safetensors

`pN` is parameter N before the first step, and `gradN.STEP` its gradient for a step. `CASE.pN` is
the parameter after the last step.
"""

import sys

import torch
from came_pytorch import CAME
from safetensors.torch import save_file

SHAPES = [(5, 3), (7,), (2, 4, 3)]
STEPS = 6
CASES = {
    "default": {"lr": 0.01},
    "options": {
        "lr": 0.1,
        "eps": (1e-3, 1e-2),
        "clip_threshold": 0.5,
        "betas": (0.8, 0.9, 0.95),
        "weight_decay": 0.1,
    },
}


def main(path: str) -> None:
    """Write all cases to `path`."""
    torch.manual_seed(20261123)
    tensors = {f"p{i}": torch.randn(shape, dtype=torch.float64) for i, shape in enumerate(SHAPES)}
    for step in range(STEPS):
        for i, shape in enumerate(SHAPES):
            tensors[f"grad{i}.{step}"] = torch.randn(shape, dtype=torch.float64)
    for case, arguments in CASES.items():
        params = [torch.nn.Parameter(tensors[f"p{i}"].clone()) for i in range(len(SHAPES))]
        optimizer = CAME(params, **arguments)
        for step in range(STEPS):
            for i, param in enumerate(params):
                param.grad = tensors[f"grad{i}.{step}"].clone()
            optimizer.step()
        tensors |= {f"{case}.p{i}": param.detach() for i, param in enumerate(params)}
    save_file(tensors, path)


if __name__ == "__main__":
    main(sys.argv[1])
