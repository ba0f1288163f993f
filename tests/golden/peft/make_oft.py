"""Results of peft and LyCORIS for OFT, on the network of `layers.safetensors`.

peft rotates the inputs of linear layers, LyCORIS the outputs of every layer. `layers.safetensors`
is the result of `make_layers.py`; its `base.NAME` are the frozen weights and biases.

pip install torch==2.15.0 peft==0.21.2 lycoris-lora==4.1.3 safetensors
python make_oft.py layers.safetensors oft.safetensors

For each case, the file has the initial parameters of the adapters (`CASE.start.NAME`), the output,
the gradients of the mean squared error from `target` (`CASE.grad.NAME`, `CASE.grad_input`), and the
merged weights of the layers (`CASE.merged.LAYER`). The cases are those of peft in `CASES`, and
`oft_outputs` of LyCORIS.
"""

import sys

import torch
from lycoris.modules.diag_oft import DiagOFTModule
from make_layers import TARGETS, Net
from peft import OFTConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn

PEFT = {"oft_block_size": 4, "target_modules": ["linear"]}
# Without `use_cayley_neumann`, peft inverts the matrix of the Cayley transform; with it, a Neumann
# series of `num_cayley_neumann_terms` terms replaces the inverse.
CASES = {
    "oft": OFTConfig(**PEFT, use_cayley_neumann=False),
    "oft_series": OFTConfig(**PEFT, use_cayley_neumann=True),
    "oft_terms": OFTConfig(**PEFT, use_cayley_neumann=True, num_cayley_neumann_terms=3),
}


class Flat(Net):
    """A network whose linear layer gets an input of three dimensions.

    peft treats an input of four dimensions like that of a convolution.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.pointwise(torch.tanh(self.conv(x)))).permute(0, 2, 3, 1)
        return self.linear(x.flatten(1, 2)).unflatten(1, x.shape[1:3])


def rotating_inputs(
    case: str, model: Flat, x: torch.Tensor, target: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the results of peft for a case, where only the linear layer has an adapter."""
    model = inject_adapter_in_model(CASES[case], model)
    # The elements above the diagonals of skew-symmetric blocks.
    triangles = model.linear.oft_R["default"].weight
    with torch.no_grad():
        triangles.normal_(0, 0.3)
    found = {"start.linear.oft_R.weight": triangles.detach().clone()}
    found |= output_and_gradient(model, x, target)
    found["grad.linear.oft_R.weight"] = triangles.grad.clone()
    with torch.no_grad():
        # In spite of its name, this method returns OFT's rotation, not a change of the weight.
        rotation = model.linear.get_delta_weight("default")
        merged = (rotation @ model.linear.base_layer.weight.T).T
    # The convolutions have no adapter, so their merged weights are the base's.
    found |= {f"merged.{name}": getattr(model, name).weight.detach() for name in TARGETS[:2]}
    return found | {"merged.linear": merged}


def rotating_outputs(model: Flat, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the results of LyCORIS, the case `oft_outputs`."""
    found, modules = {}, {}
    for name in TARGETS:
        # For OFT, LyCORIS derives the size of the blocks from `lora_dim`.
        modules[name] = DiagOFTModule(name, getattr(model, name), lora_dim=4)
        with torch.no_grad():
            modules[name].oft_blocks.normal_(0, 0.2)
        found[f"start.{name}.oft_blocks"] = modules[name].oft_blocks.detach().clone()
        found[f"merged.{name}"] = modules[name].get_merged_weight()[0].detach().clone()
    weights = {f"{name}.weight": modules[name].make_weight() for name in TARGETS}

    def adapted(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,))

    found |= output_and_gradient(adapted, x, target)
    # LyCORIS subtracts the transpose from each block, so the gradients of the elements below the
    # diagonal are the negatives of those above. Store those above.
    return found | {
        f"grad.{name}.oft_blocks": modules[name].oft_blocks.grad.triu(1) for name in TARGETS
    }


def output_and_gradient(model, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run a forward and a backward pass; return the output and the gradient for the input."""
    x = x.clone().requires_grad_()
    y = model(x)
    nn.functional.mse_loss(y, target).backward()
    return {"output": y.detach(), "grad_input": x.grad}


def main() -> None:
    torch.manual_seed(20261125)
    golden = load_file(sys.argv[1])
    state = {
        name.removeprefix("base."): v for name, v in golden.items() if name.startswith("base.")
    }
    found = {}
    for case in [*CASES, "oft_outputs"]:
        model = Flat()
        model.load_state_dict(state)
        data = (golden["x"], golden["target"])
        if case in CASES:
            values = rotating_inputs(case, model, *data)
        else:
            values = rotating_outputs(model, *data)
        found |= {f"{case}.{name}": value.contiguous() for name, value in values.items()}
    save_file(found, sys.argv[2])


if __name__ == "__main__":
    main()
