"""Optimizer trajectories and 8-bit states of bitsandbytes 0.50.2, and its tables of code values.

    pip install bitsandbytes==0.50.2 torch==2.11.0 safetensors
    python make_bitsandbytes.py bitsandbytes.safetensors

Needs a GPU: the CUDA kernels are the reference. `NAME.pSTEP.N` has the values of a parameter of N
elements after the first or the last step. `NAME.STATE.N` has one of its states after the last step.
The parameter of 1000 elements is below `min_8bit_size`, so its states are f32. The stored file was
made by the same calls with other random numbers.
"""

import sys

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import create_dynamic_map
from safetensors.torch import save_file

STEPS = 6
CASES = {
    "adamw8bit": (bnb.optim.AdamW8bit, {"lr": 0.01, "weight_decay": 0.1}, (5000, 1000)),
    "adam8bit": (bnb.optim.Adam8bit, {"lr": 0.01}, (5000,)),
    "lion8bit": (bnb.optim.Lion8bit, {"lr": 0.001, "weight_decay": 0.1}, (5000, 1000)),
}


def main(path: str) -> None:
    """Write all cases to `path`."""
    torch.manual_seed(20261121)
    tensors = {
        "map.signed": create_dynamic_map(True),
        "map.unsigned": create_dynamic_map(False),
    }
    for n in (5000, 1000):
        tensors[f"p0.{n}"] = torch.randn(n)
        for i in range(STEPS):
            tensors[f"grad{i}.{n}"] = torch.randn(n) * (0.1 + i)
    for name, (optimizer, arguments, sizes) in CASES.items():
        for n in sizes:
            param = torch.nn.Parameter(tensors[f"p0.{n}"].cuda())
            opt = optimizer([param], **arguments)
            for i in range(STEPS):
                param.grad = tensors[f"grad{i}.{n}"].cuda()
                opt.step()
                if i in (0, STEPS - 1):
                    tensors[f"{name}.p{i + 1}.{n}"] = param.detach().clone()
            for key, value in opt.state[param].items():
                if torch.is_tensor(value) and not key.startswith("qmap"):
                    tensors[f"{name}.{key}.{n}"] = value
    save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
