"""Linear layers, and the layers of LoRA and DoRA."""

from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import nn
from trainable_candle.testing import assert_close


def arrays(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_a_layer_is_made_from_two_sizes_as_in_torch_or_from_tensors() -> None:
    tc.manual_seed(3)
    layer = nn.Linear(4, 2)
    tc.manual_seed(3)
    expected = nn.Linear.init(4, 2)
    assert layer.weight.tolist() == expected.weight.tolist()
    assert len(layer.parameters()) == 2
    assert nn.Linear(4, 2, bias=False).bias is None
    assert nn.Linear(4, 2, dtype="bf16").weight.dtype == "bf16"
    shift = tc.ones(2)
    assert nn.Linear(tc.ones(2, 4), bias=shift).bias is shift
    with pytest.raises(TypeError, match="Linear: the weight is int"):
        nn.Linear(4, "2")  # type: ignore[arg-type]


def test_a_linear_layer_equals_numpy():
    x, w, b = arrays(0, (2, 3, 5), (4, 5), (4,))
    assert_close(nn.Linear(tc.tensor(w), tc.tensor(b))(tc.tensor(x)), x @ w.T + b, atol=1e-5)
    assert_close(nn.Linear(tc.tensor(w))(tc.tensor(x)), x @ w.T, atol=1e-5)


def test_a_frozen_layer_saves_nothing_for_its_backward_pass_and_a_trainable_one_gets_gradients():
    x, w = arrays(1, (3, 5), (4, 5))
    frozen = nn.Linear(tc.tensor(w))
    assert frozen.parameters() == []
    before = tc.memory.saved_bytes()
    y = frozen(tc.Var(x))
    assert tc.memory.saved_bytes() == before
    del y
    layer = nn.Linear(tc.Var(w))
    layer(tc.tensor(x)).sum().backward()
    assert_close(layer.weight.grad, np.broadcast_to(x.sum(0), (4, 5)), atol=1e-5)


def test_initial_values_have_the_bound_of_torch_and_follow_the_seed():
    tc.manual_seed(0)
    layer = nn.Linear.init(64, 128)
    assert layer.weight.shape == (128, 64)
    assert layer.bias.shape == (128,)
    weight = layer.weight.numpy()
    assert np.abs(weight).max() <= 1 / 8  # 1 / sqrt(64)
    # The standard deviation of uniform numbers between -1/8 and 1/8.
    assert abs(weight.std() - 1 / 8 / np.sqrt(3)) < 2e-3
    assert nn.Linear.init(3, 2, bias=False).bias is None
    assert nn.Linear.init(3, 2, dtype="f64").weight.dtype == "f64"
    tc.manual_seed(0)
    np.testing.assert_array_equal(nn.Linear.init(64, 128).weight.numpy(), weight)


def test_wrong_arguments_of_linear_are_errors():
    with pytest.raises(
        tc.ShapeError,
        match=r"Linear: the weight has shape \(3,\), expected \(out_features, in_features\)",
    ):
        nn.Linear(tc.ones(3))
    with pytest.raises(tc.ShapeError, match=r"Linear: the bias has shape \(3,\), expected \(2,\)"):
        nn.Linear(tc.ones(2, 3), tc.ones(3))
    with pytest.raises(
        tc.ShapeError, match=r"linear: the input has shape \[4\], expected \(..., 3\)"
    ):
        nn.Linear(tc.ones(2, 3))(tc.ones(4))
    with pytest.raises(tc.DTypeError, match="linear: the input is f64, the weight f32"):
        nn.Linear(tc.ones(2, 3))(tc.ones(3, dtype="f64"))


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_lora_layer_equals_numpy_and_its_merged_layer(rslora, with_bias):
    x, w, b, down, up = arrays(2, (2, 3, 5), (4, 5), (4,), (2, 5), (4, 2))
    bias = tc.tensor(b) if with_bias else None
    rank, alpha = 2, 6.0
    lora = nn.LoRALinear(tc.tensor(w), rank, alpha, bias=bias, rslora=rslora)
    scale = alpha / np.sqrt(rank) if rslora else alpha / rank
    assert lora.scale == pytest.approx(scale)
    base = x @ w.T + (b if with_bias else 0)
    assert_close(lora(tc.tensor(x)), base, atol=1e-5)
    lora.lora_down.set(tc.tensor(down))
    lora.lora_up.set(tc.tensor(up))
    assert_close(lora.forward(tc.tensor(x)), base + scale * (x @ down.T) @ up.T, atol=1e-4)
    assert_close(lora.merge(), w + scale * up @ down, atol=1e-5)
    merged = nn.Linear(lora.merge(), bias)
    assert_close(merged(tc.tensor(x)), lora(tc.tensor(x)).numpy(), atol=1e-4)


def test_gradients_of_lora_factors_equal_numpy():
    x, w, g, down, up = arrays(3, (2, 3, 5), (4, 5), (2, 3, 4), (2, 5), (4, 2))
    lora = nn.LoRALinear(tc.tensor(w), rank=2, alpha=4.0)
    scale = 2.0  # alpha / rank
    lora.lora_down.set(tc.tensor(down))
    lora.lora_up.set(tc.tensor(up))
    lora(tc.tensor(x)).backward(tc.tensor(g))
    flat_x, flat_g = x.reshape(6, 5), g.reshape(6, 4)
    expected_down = scale * (flat_g @ up).T @ flat_x
    expected_up = scale * flat_g.T @ (flat_x @ down.T)
    assert_close(lora.lora_down.grad, expected_down, atol=1e-4)
    assert_close(lora.lora_up.grad, expected_up, atol=1e-4)
    grad_down, grad_up = tc.lora_backward(
        tc.tensor(g), tc.tensor(x), tc.tensor(down), tc.tensor(up), scale
    )
    assert_close(grad_down, expected_down, atol=1e-4)
    assert_close(grad_up, expected_up, atol=1e-4)


def test_a_lora_layer_has_f32_factors_and_the_dtype_of_its_base():
    lora = nn.LoRALinear(tc.ones(4, 5, dtype="bf16"), rank=3, alpha=3)
    assert list(lora.named_parameters()) == ["lora_down", "lora_up"]
    assert lora.get_vars() == lora.parameters() == [lora.lora_down, lora.lora_up]
    assert (lora.lora_down.shape, lora.lora_up.shape) == ((3, 5), (4, 3))
    assert lora.lora_down.dtype == lora.lora_up.dtype == "f32"
    assert lora.lora_up.tolist() == [[0] * 3] * 4
    assert lora.weight.dtype == "bf16"
    assert lora(tc.ones(5, dtype="bf16")).dtype == "bf16"
    assert lora.merge().dtype == "bf16"


def test_a_variable_as_base_is_frozen():
    lora = nn.LoRALinear(tc.Var(tc.ones(4, 5)), rank=2, alpha=2.0)
    assert lora.parameters() == [lora.lora_down, lora.lora_up]


def test_dropout_has_an_effect_only_in_training():
    tc.manual_seed(0)
    lora = nn.LoRALinear(tc.zeros(3, 50), rank=2, alpha=2.0, dropout=0.5)
    lora.lora_up.set(tc.ones(3, 2))
    x = tc.ones(4, 50)
    # The rows of x are equal, but dropout draws a mask for each row.
    assert len(set(lora(x)[:, 0].tolist())) > 1
    lora.eval()
    assert len(set(lora(x)[:, 0].tolist())) == 1
    np.testing.assert_allclose(lora(x)[0].numpy(), lora.merge().numpy().sum(1), rtol=1e-5)


def test_a_dora_layer_equals_numpy_and_its_merged_weight():
    x, w, b, down, up, magnitude = arrays(4, (2, 3, 5), (4, 5), (4,), (2, 5), (4, 2), (4,))
    dora = nn.DoRALinear(tc.tensor(w), rank=2, alpha=4.0, bias=tc.tensor(b))
    assert list(dora.named_parameters()) == ["lora_down", "lora_up", "magnitude"]
    assert_close(dora.magnitude, np.linalg.norm(w, axis=1), atol=1e-5)
    assert_close(dora(tc.tensor(x)), x @ w.T + b, atol=1e-5)
    for var, value in zip(dora.get_vars(), (down, up, magnitude), strict=True):
        var.set(tc.tensor(value))
    adapted = w + 2 * up @ down  # alpha / rank is 2
    merged = adapted * (magnitude / np.linalg.norm(adapted, axis=1))[:, None]
    assert_close(dora(tc.tensor(x)), x @ merged.T + b, atol=1e-4)
    assert_close(dora.merge(), merged, atol=1e-5)


def test_a_dora_layer_loads_the_state_of_another():
    (w,) = arrays(5, (4, 5))
    first, second = (
        nn.DoRALinear(base, rank=2, alpha=4.0) for base in (tc.tensor(w), tc.ones(4, 5))
    )
    first.lora_up.set(tc.ones(4, 2))
    assert list(first.state_dict()) == ["weight", "lora_down", "lora_up", "magnitude"]
    second.load_state_dict(first.state_dict())
    x = tc.ones(3, 5)
    np.testing.assert_array_equal(first(x).numpy(), second(x).numpy())


@pytest.mark.parametrize("kind", [nn.LoRALinear, nn.DoRALinear])
@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    # `arguments` are the weight, the rank and alpha.
    [
        ((tc.ones(4), 2, 2.0), {}, tc.ShapeError, "Linear: the weight has shape"),
        (
            (tc.ones(4, 5), 0, 2.0),
            {},
            tc.ArgumentError,
            "Adapter: rank is 0, expected an integer of at least 1",
        ),
        (
            (tc.ones(4, 5), -1, 2.0),
            {},
            tc.ArgumentError,
            "Adapter: rank is -1, expected an integer of at least 1",
        ),
        ((tc.ones(4, 5), 2, float("nan")), {}, tc.ArgumentError, "Adapter: alpha is NaN"),
        (
            (tc.ones(4, 5), 2, 2.0),
            {"dropout": 1.0},
            tc.ArgumentError,
            "Adapter: the dropout is 1, expected",
        ),
        (
            (tc.ones(4, 5), 2, 2.0),
            {"bias": tc.ones(5)},
            tc.ShapeError,
            "Linear: the bias has shape",
        ),
    ],
)
def test_wrong_arguments_of_adapters_are_errors(kind, arguments, options, error, text):
    with pytest.raises(error, match=text):
        kind(*arguments, **options)


@pytest.mark.parametrize("layer", [tc.nn.Linear, tc.nn.LoRALinear, tc.nn.DoRALinear])
@pytest.mark.parametrize("operand", ["weight", "bias"])
def test_operands_that_are_no_tensors_are_reported(layer: Any, operand: str) -> None:
    weight = [[1.0]] if operand == "weight" else tc.zeros(3, 4)
    rank_and_alpha = () if layer is tc.nn.Linear else (2, 2.0)
    with pytest.raises(TypeError, match=f"{layer.__name__}: the {operand} is (list|int)"):
        layer(weight, *rank_and_alpha, bias=None if operand == "weight" else 3)


def test_gradients_of_several_lora_layers_are_computed_in_one_call():
    g, x, down, up = arrays(4, (6, 4), (6, 5), (2, 5), (4, 2))
    downs = [tc.Var(tc.tensor(down)) for _ in range(2)]
    ups = [tc.Var(tc.tensor(up)) for _ in range(2)]
    scale = 2.0
    grads = [tc.tensor(g), tc.tensor(2 * g)]
    tc.lora_backward_(grads, [tc.tensor(x)] * 2, downs, ups, scale)
    # The second layer has twice the gradient of the first.
    for times, lora_down, lora_up in zip((1, 2), downs, ups, strict=True):
        assert_close(lora_down.grad, times * scale * (g @ up).T @ x, atol=1e-4)
        assert_close(lora_up.grad, times * scale * g.T @ (x @ down.T), atol=1e-4)
    with pytest.raises(tc.ArgumentError, match="lora_backward_: found 2 grad_outputs, but"):
        tc.lora_backward_(grads, [tc.tensor(x)], downs, ups, scale)


def test_gradients_of_f32_factors_are_f32_if_inputs_are_bf16():
    x, g, down, up = (tc.tensor(a) for a in arrays(5, (6, 5), (6, 4), (2, 5), (4, 2)))
    in_bf16 = [t.to("bf16") for t in (g, x)]
    scale = 0.5
    grads = tc.lora_backward(*in_bf16, tc.Var(down), tc.Var(up), scale)
    assert [t.dtype for t in grads] == ["f32", "f32"]
    for found, expected in zip(grads, tc.lora_backward(g, x, down, up, scale), strict=True):
        assert_close(found, expected.numpy(), atol=0.1)


def test_bias_is_true_or_false_after_sizes_and_is_given_only_once_after_a_weight() -> None:
    assert nn.Linear(4, 2, bias=0).bias is None
    assert nn.Linear(4, 2, bias=1).bias is not None
    with pytest.raises(TypeError, match="the bias is a Tensor, expected True or False"):
        nn.Linear(4, 2, bias=tc.ones(2))
    with pytest.raises(TypeError, match="the bias is given twice; leave out the argument `bias`"):
        nn.Linear(tc.ones(2, 4), tc.ones(2), bias=tc.zeros(2))
