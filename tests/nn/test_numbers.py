"""Arguments that are not valid numbers: each error names the operation and the parameter."""

from collections.abc import Callable
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.nn import functional

X = tc.ones(2, 2)
ROW = tc.ones(2, 1, 2)  # (tokens, heads, width of a head)
BOUNDS = tc.tensor([0, 2])  # of the sequences in ROW: one sequence, tokens 0 and 1


def parameter() -> tc.Var:
    return tc.Var([1.0])


# A key is how the error's message begins. Its value is a pair: what the operation expects according
# to the message, and a function that passes its argument to the operation.
CALLS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "LoraConfig: lora_alpha": ("a number", lambda n: tc.LoraConfig(lora_alpha=n)),
    "LoraConfig: lora_dropout": ("a number", lambda n: tc.LoraConfig(lora_dropout=n)),
    "LoraConfig: alpha_pattern": (
        "a dict of names and numbers, or None",
        lambda n: tc.LoraConfig(alpha_pattern={"x": n}),
    ),
    "AdamW: lr": ("a number", lambda n: tc.optim.AdamW([parameter()], lr=n)),
    "AdamW: betas": ("two numbers", lambda n: tc.optim.AdamW([parameter()], betas=(0.9, n))),
    "Prodigy: beta3": ("a number or None", lambda n: tc.optim.Prodigy([parameter()], beta3=n)),
    "Adam: lr of a parameter group": (
        "a number",
        lambda n: tc.optim.Adam([{"params": [parameter()], "lr": n}]),
    ),
    "clip_grad_norm_: max_norm": (
        "a number",
        lambda n: tc.optim.clip_grad_norm_([parameter()], n),
    ),
    "GradScaler: init_scale": ("a number", lambda n: tc.optim.GradScaler(init_scale=n)),
    "layer_norm: eps": ("a number", lambda n: functional.layer_norm(X, 2, eps=n)),
    "add_layer_norm: eps": ("a number", lambda n: functional.add_layer_norm(X, X, 2, eps=n)),
    "modulated_layer_norm: eps": (
        "a number",
        lambda n: functional.modulated_layer_norm(X, X, X, eps=n),
    ),
    "dropout: p": ("a number", lambda n: functional.dropout(X, n)),
    "scaled_dot_product_attention: scale": (
        "a number or None",
        lambda n: functional.scaled_dot_product_attention(X, X, X, scale=n),
    ),
    "varlen_attention: scale": (
        "a number or None",
        lambda n: functional.varlen_attention(ROW, ROW, ROW, BOUNDS, scale=n),
    ),
    "huber_loss: delta": ("a number", lambda n: functional.huber_loss(X, X, delta=n)),
    "clamp: max": ("a number or None", lambda n: X.clamp(max=n)),
    # There is no file "none": the scale is checked before the file is opened.
    "load_adapter: scale": (
        "a number",
        lambda n: tc.models.DigitsTransformer().load_adapter("none", scale=n),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_integers_too_large_for_floats_are_reported(name: str) -> None:
    expected, call = CALLS[name]
    message = f"^{name} is .* beyond the range of floating point, expected {expected}$"
    for number in (10**400, -(10**400)):
        with pytest.raises(tc.ArgumentError, match=message):
            call(number)


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_are_no_numbers_are_reported(name: str) -> None:
    expected, call = CALLS[name]
    with pytest.raises(TypeError, match=f"^{name} is .*, expected {expected}$"):
        call("1")


def test_betas_of_one_number_and_an_lr_of_none_are_reported() -> None:
    with pytest.raises(TypeError, match=r"^AdamW: betas is .*tuple, expected two numbers$"):
        tc.optim.AdamW([parameter()], betas=(0.9,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^AdamW: lr is None, expected a number$"):
        tc.optim.AdamW([parameter()], lr=None)  # type: ignore[arg-type]
