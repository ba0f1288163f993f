"""Results of peft for LoRA, rsLoRA and DoRA on two linear layers.

pip install torch==2.11.0 peft==0.21.2 safetensors
python make_peft.py peft.safetensors

For each case, the file has the initial parameters of the adapters (`CASE.start.NAME`), the output,
the loss, the gradients, the merged weights of the layers (`CASE.merged.LAYER`), and the losses and
final parameters of five steps of AdamW. `base.NAME` are the frozen weights and biases.
"""

import sys

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn

CASES = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora_rslora": {"use_dora": True, "use_rslora": True},
    "pattern": {"rank_pattern": {"second": 2}, "alpha_pattern": {"second": 5}},
}


def main() -> None:
    torch.manual_seed(20261121)
    found = {}
    # Dimensions: batch, tokens, features.
    x, target = torch.randn(2, 6, 9), torch.randn(2, 6, 5)
    base = nn.ModuleDict({"first": nn.Linear(9, 11), "second": nn.Linear(11, 5)})
    found |= {"x": x, "target": target}
    found |= {f"base.{name}": value.clone() for name, value in base.state_dict().items()}
    for case, options in CASES.items():
        model = nn.ModuleDict({"first": nn.Linear(9, 11), "second": nn.Linear(11, 5)})
        model.load_state_dict(base.state_dict())
        config = LoraConfig(r=3, lora_alpha=2, target_modules=["first", "second"], **options)
        model = inject_adapter_in_model(config, model)
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                continue
            # peft's initial adapters have no effect, so replace their values.
            with torch.no_grad():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
                else:
                    parameter.normal_(0, 0.3)
        trained = {
            name.replace(".default", ""): parameter
            for name, parameter in model.named_parameters()
            if "lora_" in name
        }
        found |= {f"{case}.start.{name}": value.detach().clone() for name, value in trained.items()}
        inputs = x.clone().requires_grad_()
        y = model["second"](torch.tanh(model["first"](inputs)))
        loss = nn.functional.mse_loss(y, target)
        loss.backward()
        found |= {f"{case}.output": y.detach(), f"{case}.loss": loss.detach()}
        found[f"{case}.grad_input"] = inputs.grad
        found |= {f"{case}.grad.{name}": value.grad.clone() for name, value in trained.items()}
        with torch.no_grad():
            for layer in ("first", "second"):
                module = model[layer]
                delta = module.get_delta_weight("default")
                if config.use_dora:
                    merged = module.base_layer.weight + delta
                    magnitude = module.lora_magnitude_vector["default"].weight
                    merged = merged * (magnitude / merged.norm(dim=1))[:, None]
                else:
                    merged = module.base_layer.weight + delta
                found[f"{case}.merged.{layer}"] = merged.clone()
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.01)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            y = model["second"](torch.tanh(model["first"](x)))
            loss = nn.functional.mse_loss(y, target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[f"{case}.losses"] = torch.tensor(losses)
        found |= {f"{case}.final.{name}": value.detach().clone() for name, value in trained.items()}
    save_file({name: value.contiguous() for name, value in found.items()}, sys.argv[1])


if __name__ == "__main__":
    main()
