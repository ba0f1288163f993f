"""Optimizer trajectories, gradient clipping and learning-rate schedules of torch and transformers.

    pip install torch==2.11.0 transformers==5.23.0 safetensors
    python make_torch.py torch.safetensors

All runs of optimizers are on the CPU, start from the parameter `p0` and take one step with each
gradient `grad.I`. NAME is a key of `CASES`, or `adafactor_SHAPE` with a key of
`ADAFACTOR_SHAPES`. `NAME.p` is the parameter and `NAME.STATE` is a state of the optimizer, both
after the last step, in f32. `NAME.f64.p` and `NAME.f64.STATE` have the same in f64.
`clip.TYPE.norm` is the norm of type TYPE (2 or inf) of all gradients together before clipping, and
`clip.TYPE.grad.3` is gradient 3 after clipping to a norm of 1.5. `schedule.NAME` has the factor of
the learning rate for each step.
"""

import sys

import torch
from safetensors.torch import save_file
from torch.optim import SGD, Adafactor, Adam, AdamW
from transformers import optimization

CASES = {
    "sgd": (SGD, {"lr": 0.05}),
    "sgd_nesterov": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd_dampening": (SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "maximize": True}),
    "adam": (Adam, {"lr": 0.01}),
    "adam_l2": (Adam, {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    "adam_amsgrad": (Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw_amsgrad": (AdamW, {"lr": 0.01, "amsgrad": True}),
    "adafactor": (Adafactor, {"lr": 0.01}),
    "adafactor_options": (
        Adafactor,
        {
            "lr": 0.4,
            "beta2_decay": -0.5,
            "eps": (1e-6, 1.2),
            "d": 1.01,
            "weight_decay": 0.1,
            "maximize": True,
        },
    ),
}
# Adafactor treats a vector and a stack of matrices differently from one matrix. Parameters of these
# shapes have the first elements of `p0` (the vector has all 37 * 29 = 1073 elements), and their
# gradients the first elements of each `grad.I`.
ADAFACTOR_SHAPES = {"vector": (1073,), "matrices": (2, 16, 30)}
SCHEDULES = {
    "constant": (optimization.get_constant_schedule_with_warmup, {"num_warmup_steps": 10}),
    "linear": (
        optimization.get_linear_schedule_with_warmup,
        {"num_warmup_steps": 10, "num_training_steps": 60},
    ),
    "cosine": (
        optimization.get_cosine_schedule_with_warmup,
        {"num_warmup_steps": 10, "num_training_steps": 60},
    ),
    "cosine_cycles": (
        optimization.get_cosine_schedule_with_warmup,
        {"num_warmup_steps": 0, "num_training_steps": 60, "num_cycles": 1.75},
    ),
    "polynomial": (
        optimization.get_polynomial_decay_schedule_with_warmup,
        {"num_warmup_steps": 10, "num_training_steps": 60, "lr_end": 0.001, "power": 2.0},
    ),
}
SCHEDULE_STEPS = 80  # more than `num_training_steps`: also the factors after a schedule's end
SCHEDULE_LR = 0.01


def main(path: str) -> None:
    """Write all cases to `path`."""
    torch.manual_seed(20261121)
    tensors = {"p0": torch.randn(37, 29)}
    grads = [torch.randn(37, 29) * (0.5 + i) for i in range(8)]
    for i, grad in enumerate(grads):
        tensors[f"grad.{i}"] = grad
    for dtype in (torch.float32, torch.float64):
        for name, (optimizer, arguments) in CASES.items():
            suffix = "" if dtype == torch.float32 else ".f64"
            param = torch.nn.Parameter(tensors["p0"].to(dtype, copy=True))
            opt = optimizer([param], **arguments)
            for grad in grads:
                param.grad = grad.to(dtype, copy=True)
                opt.step()
            tensors[f"{name}{suffix}.p"] = param.detach()
            for key, value in opt.state[param].items():
                if key != "step":
                    tensors[f"{name}{suffix}.{key}"] = value

    for shape_name, shape in ADAFACTOR_SHAPES.items():
        count = torch.Size(shape).numel()
        for dtype in (torch.float32, torch.float64):
            suffix = "" if dtype == torch.float32 else ".f64"
            start = tensors["p0"].flatten()[:count].reshape(shape)
            param = torch.nn.Parameter(start.to(dtype, copy=True))
            opt = Adafactor([param], lr=0.01)
            for grad in grads:
                param.grad = grad.flatten()[:count].reshape(shape).to(dtype, copy=True)
                opt.step()
            tensors[f"adafactor_{shape_name}{suffix}.p"] = param.detach()
            for key, value in opt.state[param].items():
                if key != "step":
                    tensors[f"adafactor_{shape_name}{suffix}.{key}"] = value

    for norm_type in (2.0, float("inf")):
        params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm=1.5, norm_type=norm_type)
        tensors[f"clip.{norm_type:.0f}.norm"] = norm.reshape(1)
        tensors[f"clip.{norm_type:.0f}.grad.3"] = params[3].grad

    for name, (schedule, arguments) in SCHEDULES.items():
        opt = SGD([torch.nn.Parameter(torch.zeros(1))], lr=SCHEDULE_LR)
        scheduler = schedule(opt, **arguments)
        factors = []
        for _ in range(SCHEDULE_STEPS):
            factors.append(scheduler.get_last_lr()[0] / SCHEDULE_LR)
            opt.step()
            scheduler.step()
        tensors[f"schedule.{name}"] = torch.tensor(factors, dtype=torch.float64)
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
