"""Write the parameters that torch's Muon and schedulefree's AdamW reach, in f64.

    pip install torch==2.15.0 schedulefree==1.4.1 safetensors
    python make_averaged.py averaged.safetensors

`pN` is parameter N before the first step, and `gradN.STEP` its gradient for a step. `CASE.pN` is
the parameter after the last step. `CASE.evalN`, for schedulefree alone, is the parameter after the
optimizer's `eval`, which this script calls after the last step. Torch rounds Muon's products to
bf16; this script makes torch's function compute them in f64.
"""

import inspect
import sys

import torch
from safetensors.torch import save_file
from schedulefree import AdamWScheduleFree
from torch.optim import _muon

SHAPES = [(5, 3), (4, 9), (7,), (6, 2, 3)]
STEPS = 6
# The arguments of each case. The cases `*_options` differ from the defaults in most arguments.
MUON = {
    "muon": {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"},
    "muon_options": {
        "lr": 0.05,
        "weight_decay": 0.3,
        "momentum": 0.8,
        "nesterov": False,
        "ns_coefficients": (2.0, -1.5, 0.5),
        "ns_steps": 7,
        "adjust_lr_fn": "original",
    },
}
SCHEDULE_FREE = {
    "schedule_free": {"lr": 0.05},
    "schedule_free_options": {
        "lr": 0.1,
        "betas": (0.8, 0.95),
        "eps": 1e-3,
        "weight_decay": 0.2,
        "warmup_steps": 3,
        "r": 0.5,
        "weight_lr_power": 1.0,
    },
}


def take_steps(optimizer, params, tensors):
    """Take STEPS steps with the gradients in `tensors`; `params` has parameters by number."""
    for step in range(STEPS):
        for i, param in params.items():
            param.grad = tensors[f"grad{i}.{step}"].reshape(param.shape).clone()
        optimizer.step()


def main(path: str) -> None:
    """Write all cases to `path`."""
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    exec(source.replace("torch.bfloat16", "torch.float64"), vars(_muon))
    torch.manual_seed(20261124)
    tensors = {f"p{i}": torch.randn(shape, dtype=torch.float64) for i, shape in enumerate(SHAPES)}
    for step in range(STEPS):
        for i, shape in enumerate(SHAPES):
            tensors[f"grad{i}.{step}"] = torch.randn(shape, dtype=torch.float64)
    for case, arguments in MUON.items():
        # Torch's Muon takes only matrices: leave out the vector, and flatten the 3-D parameter.
        shapes = {i: shape for i, shape in enumerate(SHAPES) if len(shape) > 1}
        params = {
            i: torch.nn.Parameter(tensors[f"p{i}"].reshape(shape[0], -1).clone())
            for i, shape in shapes.items()
        }
        take_steps(_muon.Muon(params.values(), **arguments), params, tensors)
        tensors |= {f"{case}.p{i}": p.detach().reshape(SHAPES[i]) for i, p in params.items()}
    for case, arguments in SCHEDULE_FREE.items():
        params = {i: torch.nn.Parameter(tensors[f"p{i}"].clone()) for i in range(len(SHAPES))}
        optimizer = AdamWScheduleFree(params.values(), **arguments)
        optimizer.train()
        take_steps(optimizer, params, tensors)
        tensors |= {f"{case}.p{i}": p.detach().clone() for i, p in params.items()}
        optimizer.eval()
        tensors |= {f"{case}.eval{i}": p.detach() for i, p in params.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
