"""Errors of 8-bit products on the activations and gradients of a trained language model.

python benches/rounded_activations.py MODEL [--device cuda] [--rows 4]

MODEL is a folder in transformers' format, such as benches/pretrain.py writes. transformers computes
the loss of the texts that `rounded_training.py` holds out, in bf16. The script keeps the input of
every linear layer of the blocks and the gradient of its result. From these, this library computes
the layer's result and the gradient of its input, with products of the values of a bf16 base, of the
values of an 8-bit base, and of its codes. The error is the root mean square of the difference from
products in f32 with the bf16 weight, divided by the root mean square of these products. Each line
has the mean and the largest error over the layers of a kind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rounded_training import write_texts
from transformers import AutoTokenizer, LlamaForCausalLM

import trainable_candle as tc
from trainable_candle.nn.functional import linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROW_TOKENS = 1024
# The base's format (None: bf16), and whether its codes are multiplied.
WAYS = ((None, False), ("int8", False), ("int8", True), ("fp8", False), ("fp8", True))


@dataclass
class Product:
    """A linear layer with the input and the output gradient that one batch gave it."""

    kind: str
    """The last part of the layer's name, such as "q_proj"."""
    weight: Any
    """(outputs, inputs). All tensors of this class are torch's, in bf16 and on the CPU."""
    x: Any
    """The input, (tokens, inputs)."""
    grad: Any
    """The gradient of the result, (tokens, outputs)."""


def products(model: Any, ids: Any) -> list[Product]:
    """Run a batch through the model, forward and backward, and return what its layers got."""
    found: list[Product] = []

    def watch(kind: str) -> Callable[..., None]:
        def forward(layer: Any, inputs: tuple[Any, ...], output: Any) -> None:
            rows = inputs[0].detach().flatten(0, -2).cpu()

            def backward(grad: Any) -> None:
                weight = layer.weight.detach().cpu()
                found.append(Product(kind, weight, rows, grad.flatten(0, -2).cpu()))

            output.register_hook(backward)

        return forward

    for name, layer in model.model.layers.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(watch(name.rpartition(".")[2]))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return found


def errors(product: Product, device: str) -> Iterator[tuple[str, float]]:
    """Yield the error of each way to compute each of the two products, with its name."""

    def moved(values: Any, dtype: str = "bf16") -> tc.Tensor:
        return tc.tensor(values.float().numpy()).to(device).to(dtype)

    def both(weight: Any, x: tc.Tensor, grad: tc.Tensor) -> tuple[tc.Tensor, tc.Tensor]:
        leaf = tc.Var(x)
        y = linear(leaf, weight)
        return y.detach(), tc.grad((y * grad).to("f32").sum(), [leaf])[0]

    def root_mean_square(values: tc.Tensor) -> float:
        return float((values * values).mean().item()) ** 0.5

    exact = both(*(moved(t, "f32") for t in (product.weight, product.x, product.grad)))
    weight, x, grad = (moved(t) for t in (product.weight, product.x, product.grad))
    for base, codes in WAYS:
        tc.set_w8a8(codes)
        found = both(weight if base is None else tc.quantize(weight, base), x, grad)
        tc.set_w8a8(False)
        way = "bf16" if base is None else f"{base}, {'codes' if codes else 'values'}"
        for which, ours, truth in zip(("result", "gradient"), found, exact, strict=True):
            error = root_mean_square(ours.to("f32") - truth)
            yield f"{way}: {which}", error / root_mean_square(truth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="a folder in transformers' format")
    parser.add_argument("--rows", type=int, default=4, help="rows of 1,024 tokens in the batch")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).to(given.device)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    with tempfile.TemporaryDirectory() as folder:
        _, held_out = write_texts(Path(folder))
        texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()]
    tokens = [token for text in texts for token in tokenizer(text)["input_ids"]]
    ids = torch.tensor(tokens[: given.rows * ROW_TOKENS]).view(given.rows, ROW_TOKENS)
    by_name: dict[str, list[float]] = defaultdict(list)
    for product in products(model, ids.to(given.device)):
        for name, error in errors(product, given.device):
            by_name[f"{name}, {product.kind}"].append(error)
            by_name[f"{name}, all layers"].append(error)
    for name in sorted(by_name):
        values = by_name[name]
        print(f"{name}: mean {statistics.mean(values):.4f}, largest {max(values):.4f}", flush=True)


if __name__ == "__main__":
    main()
