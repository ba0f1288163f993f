"""Parameters and 8-bit states of bitsandbytes 0.50.2's optimizers, and its tables of code values.

    pip install bitsandbytes==0.50.2 torch==2.11.0 safetensors
    python make_bitsandbytes.py bitsandbytes.safetensors

Needs a GPU: the CUDA kernels are the reference. `p0.N` has the initial values of a parameter of N
elements, and `gradI.N` its gradient for step I, counted from 0. `NAME.pSTEP.N` has the values after
the first step (1) or the last (6). `NAME.STATE.N` has a state of the optimizer after the last step.
1000 elements are fewer than `min_8bit_size`, 4096, so the states of that parameter are f32. The
stored file was made by the same calls with other random numbers.
"""

import sys

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import create_dynamic_map
from safetensors.torch import save_file

STEPS = 6
# The name of a case -> the class of the optimizer, its arguments, the sizes of its parameters.
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
            tensors[f"grad{i}.{n}"] = torch.randn(n) * (0.1 + i)  # larger from step to step
    for name, (kind, arguments, sizes) in CASES.items():
        for n in sizes:
            param = torch.nn.Parameter(tensors[f"p0.{n}"].cuda())
            optimizer = kind([param], **arguments)
            for i in range(STEPS):
                param.grad = tensors[f"grad{i}.{n}"].cuda()
                optimizer.step()
                if i in (0, STEPS - 1):
                    tensors[f"{name}.p{i + 1}.{n}"] = param.detach().clone()
            for key, value in optimizer.state[param].items():
                # The entries `qmap1` and `qmap2` are the tables that `tensors` has already.
                if torch.is_tensor(value) and not key.startswith("qmap"):
                    tensors[f"{name}.{key}.{n}"] = value
    save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
