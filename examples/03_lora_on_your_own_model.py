"""LoRA on a model of your own: a classifier of upright digits learns to read digits upside down.

The model is a module as in torch. `get_peft_model` freezes it and puts adapters on its linear
layers. Only the adapters are trained and saved. The script takes some seconds on a CPU:

    python examples/03_lora_on_your_own_model.py [FOLDER]
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import trainable_candle as tc
from trainable_candle import nn
from trainable_candle.demo import digits


class Classifier(nn.Module):
    """Computes the logits of the ten digits, (B, 10), from the pixels of 8x8 images, (B, 64)."""

    def __init__(self) -> None:
        self.hidden = nn.Linear(64, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, x: tc.Tensor) -> tc.Tensor:
        return self.out(nn.functional.silu(self.hidden(x)))


def pixels(images: digits.Digits, *, turned: bool) -> tc.Tensor:
    """Return the images, turned by 180 degrees if `turned`, as (N, 64), values from 0 to 1."""
    values = images.pixels[:, ::-1, ::-1] if turned else images.pixels
    flat = np.ascontiguousarray(values).reshape(-1, 64)
    return tc.tensor(flat / digits.MAX_PIXEL, dtype="f32")


def fit(model: nn.Module, x: tc.Tensor, labels: tc.Tensor, steps: int, lr: float) -> None:
    """Train the model's parameters; if the model has adapters, train only the adapters."""
    optimizer = tc.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accuracy(model: nn.Module, x: tc.Tensor, labels: tc.Tensor) -> float:
    """Return the share of the images that the model reads correctly."""
    with tc.no_grad():
        return float((model(x).argmax(1) == labels).to("f32").mean().item())


def main(folder: Path) -> dict[str, Any]:
    """Train a model, then adapters on it, and save the adapters to `folder`.

    Returns:
        The accuracy on digits upside down: of the model alone ("before"), with adapters ("after"),
        and with the adapters merged into the weights ("merged").
    """
    tc.manual_seed(0)
    train, test = digits.split(digits.load())
    train_labels = tc.tensor(train.labels, dtype="i64")
    test_labels = tc.tensor(test.labels, dtype="i64")
    upside_down = pixels(test, turned=True)

    base = Classifier()
    fit(base, pixels(train, turned=False), train_labels, steps=150, lr=5e-3)
    before = accuracy(base, upside_down, test_labels)

    config = tc.LoraConfig(r=8, lora_alpha=16, target_modules=["hidden", "out"])
    model = tc.get_peft_model(base, config)
    model.print_trainable_parameters()
    fit(model, pixels(train, turned=True), train_labels, steps=150, lr=1e-2)
    after = accuracy(model, upside_down, test_labels)

    # The folder has peft's format: peft loads it onto the same model written in torch.
    model.save_pretrained(folder)
    # Add the change by the adapters to the weights, and remove the adapters.
    merged = model.merge_and_unload()
    print(f"digits read upside down: {before:.1%} before, {after:.1%} with LoRA; saved to {folder}")
    return {"before": before, "after": after, "merged": accuracy(merged, upside_down, test_labels)}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "upside-down"))
