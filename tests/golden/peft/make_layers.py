"""Results of peft and LyCORIS for every kind of adapter on a convolution and a linear layer.

pip install torch==2.11.0 peft==0.21.2 lycoris-lora==4.1.3 safetensors
python make_layers.py layers.safetensors

For each case, the file has the initial parameters of the adapters (`CASE.start.NAME`), the output
for the input `x` (`CASE.output`), the gradients of the mean squared error from `target` (of the
parameters, `CASE.grad.NAME`, and of `x`, `CASE.grad_input`), and the merged weights of the layers
(`CASE.merged.LAYER`). `base.NAME` are the frozen weights and biases. The metadata has the scale of
each case. A case is a key of `CASES`, or `dora_input`.
"""

import json
import sys

import torch
from lycoris.modules.locon import LoConModule
from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn

TARGETS = ["conv", "pointwise", "linear"]
LORA = {"r": 3, "lora_alpha": 2, "target_modules": TARGETS}
# For LoHa and LoKr, which peft took over from LyCORIS.
LYCORIS = {"r": 2, "alpha": 3, "target_modules": TARGETS}
CASES = {
    "lora": LoraConfig(**LORA),
    "rslora": LoraConfig(**LORA, use_rslora=True),
    "dora": LoraConfig(**LORA, use_dora=True),
    "loha": LoHaConfig(**LYCORIS),
    "lokr": LoKrConfig(**LYCORIS),
    "lokr_factor": LoKrConfig(**LYCORIS, decompose_factor=2),
    # With rank 1, because peft decomposes the first factor only if the rank is below half of this
    # factor's larger side.
    "lokr_both": LoKrConfig(**(LYCORIS | {"r": 1}), decompose_both=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 8, (3, 2), stride=(2, 1), padding=(1, 0))
        self.pointwise = nn.Conv2d(8, 12, 1)
        self.linear = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.pointwise(torch.tanh(self.conv(x))))
        return self.linear(x.permute(0, 2, 3, 1))


def per_input(base: Net, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the results of DoRA with a magnitude for each input, the case `dora_input`.

    LyCORIS defines the merged weights. This function computes them itself, with a norm that is a
    constant in the backward pass, and checks them against those of LyCORIS.
    """
    found, weights, trained = {}, {}, {}
    for name in TARGETS:
        layer = getattr(base, name)
        # The multiplier is 1, the rank is 3 and alpha is 2, so the scale is 2 / 3.
        reference = LoConModule(name, layer, 1.0, 3, 2, weight_decompose=True, wd_on_out=False)
        down = (0.3 * torch.randn_like(reference.lora_down.weight)).requires_grad_()
        up = (0.3 * torch.randn_like(reference.lora_up.weight)).requires_grad_()
        magnitude = reference.dora_scale.detach().clone()
        magnitude = (magnitude * (1 + 0.2 * torch.randn_like(magnitude))).requires_grad_()
        with torch.no_grad():
            reference.lora_down.weight.copy_(down)
            reference.lora_up.weight.copy_(up)
            reference.dora_scale.copy_(magnitude)
        delta = (up.flatten(1) @ down.flatten(1)).reshape(layer.weight.shape) * (2 / 3)
        adapted = layer.weight.detach() + delta
        all_but_inputs = [d for d in range(adapted.dim()) if d != 1]
        norm = adapted.detach().square().sum(all_but_inputs, keepdim=True).sqrt()
        weights[name] = adapted * (magnitude / norm)
        torch.testing.assert_close(weights[name], reference.get_merged_weight()[0])
        trained |= {
            f"{name}.lora_A.weight": down,
            f"{name}.lora_B.weight": up,
            f"{name}.dora_scale": magnitude,
        }
        found[f"merged.{name}"] = weights[name].detach().clone()
    found |= {f"start.{name}": value.detach().clone() for name, value in trained.items()}
    inputs = x.clone().requires_grad_()
    parameters = {f"{name}.weight": weights[name] for name in TARGETS}
    y = torch.func.functional_call(base, parameters, (inputs,))
    nn.functional.mse_loss(y, target).backward()
    found |= {"output": y.detach(), "grad_input": inputs.grad}
    return found | {f"grad.{name}": value.grad for name, value in trained.items()}


def main() -> None:
    torch.manual_seed(20261121)
    base = Net()
    # The network's output for x has the shape of target.
    x, target = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 3, 10)
    found = {"x": x, "target": target}
    found |= {f"base.{name}": value.clone() for name, value in base.state_dict().items()}
    scales = {}
    for case, config in CASES.items():
        model = Net()
        model.load_state_dict(base.state_dict())
        model = inject_adapter_in_model(config, model)
        trained = {
            name.replace(".default", ""): parameter
            for name, parameter in model.named_parameters()
            if any(part in name for part in ("lora_", "hada_", "lokr_"))
        }
        for name, parameter in trained.items():
            with torch.no_grad():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
                else:
                    parameter.normal_(0, 0.4)
        found |= {f"{case}.start.{name}": v.detach().clone() for name, v in trained.items()}
        inputs = x.clone().requires_grad_()
        y = model(inputs)
        nn.functional.mse_loss(y, target).backward()
        found |= {f"{case}.output": y.detach(), f"{case}.grad_input": inputs.grad}
        found |= {f"{case}.grad.{name}": value.grad.clone() for name, value in trained.items()}
        # All layers have the same scale. "default" is the name that peft gives to the adapter.
        scales[case] = model.linear.scaling["default"]
        with torch.no_grad():
            for name in TARGETS:
                layer = getattr(model, name)
                merged = layer.base_layer.weight + layer.get_delta_weight("default")
                # `get_delta_weight` knows no magnitudes.
                if case == "dora":
                    magnitude = layer.lora_magnitude_vector["default"].weight
                    norm = merged.flatten(1).norm(dim=1)
                    ratio = magnitude.flatten() / norm
                    merged = merged * ratio.reshape(-1, *[1] * (merged.dim() - 1))
                found[f"{case}.merged.{name}"] = merged.clone()
    found |= {f"dora_input.{name}": v for name, v in per_input(base, x, target).items()}
    scales["dora_input"] = 2 / 3
    save_file(
        {name: value.contiguous() for name, value in found.items()},
        sys.argv[1],
        metadata={"scales": json.dumps(scales)},
    )


if __name__ == "__main__":
    main()
