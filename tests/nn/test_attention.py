"""`nn.MultiheadAttention` against its formula, and against torch where torch is installed."""

import itertools
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

RNG = np.random.default_rng(1)
# The embedding's width, the number of heads, the length of the query, the length of the key and the
# value, the batch size. torch's documentation has the same letters, but N for the batch size.
E, H, L, S, B = 8, 2, 3, 5, 4


def make_module(**settings: Any) -> tc.nn.MultiheadAttention:
    module = tc.nn.MultiheadAttention(E, H, dtype="f64", **settings)
    for parameter in module.named_parameters().values():
        parameter.set(tc.tensor(RNG.standard_normal(parameter.shape) * 0.5))
    return module


def test_attention_equals_its_formula() -> None:
    module = make_module(batch_first=True)
    x, y = RNG.standard_normal((B, L, E)), RNG.standard_normal((B, S, E))
    # (3 * E, E) and (3 * E,): E rows for the query, then for the key, then for the value
    w, b = module.in_proj_weight.numpy(), module.in_proj_bias
    assert b is not None
    q, k, v = (
        (a @ w[n * E : (n + 1) * E].T + b.numpy()[n * E : (n + 1) * E])
        .reshape(B, -1, H, E // H)
        .swapaxes(1, 2)
        for n, a in enumerate((x, y, y))
    )
    # The weights are the softmax of the scores, (B, H, L, S).
    exponentials = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(E // H))
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    out = module.out_proj
    assert out.bias is not None
    mixed = (weights @ v).swapaxes(1, 2).reshape(B, L, E)
    expected = mixed @ out.weight.numpy().T + out.bias.numpy()
    for need_weights in (True, False):
        found, found_weights = module(
            tc.tensor(x), tc.tensor(y), tc.tensor(y), need_weights=need_weights
        )
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)
        assert (found_weights is not None) == need_weights
    by_head = module(tc.tensor(x), tc.tensor(y), tc.tensor(y), average_attn_weights=False)[1]
    np.testing.assert_allclose(by_head.numpy(), weights, rtol=1e-9)


def test_with_a_causal_mask_results_do_not_depend_on_later_positions() -> None:
    module = make_module()
    x = RNG.standard_normal((L, E))
    changed = x.copy()
    changed[-1] += 1
    # Query, key and value are the same tensor.
    result, changed_result = (
        module(*[tc.tensor(a)] * 3, is_causal=True)[0].numpy() for a in (x, changed)
    )
    np.testing.assert_allclose(result[:-1], changed_result[:-1])
    assert np.abs(result[-1] - changed_result[-1]).max() > 1e-3


def test_gradients_reach_all_parameters() -> None:
    module = make_module()
    x = tc.randn(L, B, E, dtype="f64")
    module(x, x, x, need_weights=False)[0].square().sum().backward()
    for name, parameter in module.named_parameters().items():
        assert parameter.grad is not None, name


def test_wrong_numbers_of_heads_and_shapes_of_masks_are_reported() -> None:
    with pytest.raises(tc.ArgumentError, match="num_heads is 3, expected a divisor of embed_dim"):
        tc.nn.MultiheadAttention(8, 3)
    x = tc.ones(L, E, dtype="f64")
    with pytest.raises(tc.ShapeError, match="attn_mask has shape"):
        make_module()(x, x, x, attn_mask=tc.ones(2, 2))


@pytest.mark.parametrize(
    ("shapes", "masks", "message"),
    [
        # A transposed mask has the right number of elements, but the wrong shape.
        ([(B, L, E), (B, S, E)], {"attn_mask": (S, L)}, rf"attn_mask .*\({L}, {S}\) or \({B * H}"),
        ([(B, L, E), (B, S, E)], {"attn_mask": (B, H, L, S)}, "attn_mask has shape"),
        # Padding masks are (B, S), or (S,) without a batch.
        ([(B, L, E), (B, S, E)], {"key_padding_mask": (S, B)}, rf"key_.*expected \({B}, {S}\)"),
        ([(L, E), (S, E)], {"key_padding_mask": (1, S)}, rf"key_padding.*expected \({S},\)"),
        ([(B, L, E), (1, S, E)], {}, "expected one batch size for all"),
        ([(B, L, E), (B, S, E), (B, L, E)], {}, "one length for key and value"),
    ],
    ids=[
        "transposed mask",
        "mask of four dimensions",
        "transposed padding",
        "batch of padding",
        "batch sizes",
        "lengths",
    ],
)
def test_shapes_that_torch_rejects_are_rejected(
    shapes: Any, masks: dict[str, tuple[int, ...]], message: str
) -> None:
    # The shapes are those of query, key and value; without a third one, the value's is the key's.
    inputs = [tc.ones(shape, dtype="f64") for shape in (*shapes, shapes[-1])[:3]]
    given: Any = {name: tc.zeros(shape, dtype="u8") for name, shape in masks.items()}
    with pytest.raises(tc.ShapeError, match=message):
        make_module(batch_first=True)(*inputs, **given)
    torch = pytest.importorskip("torch")
    theirs = torch.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    given = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in masks.items()}
    with pytest.raises((RuntimeError, AssertionError)):
        theirs(*(torch.ones(x.shape, dtype=torch.float64) for x in inputs), **given)


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_integer_masks_are_rejected(name: str) -> None:
    x = tc.ones(1, L, E, dtype="f64")
    mask = tc.zeros((L, L) if name == "attn_mask" else (1, L), dtype="i64")
    with pytest.raises(tc.DTypeError, match=rf"{name} has dtype i64, expected u8.*to\(.u8.\)"):
        make_module(batch_first=True)(x, x, x, **{name: mask})


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_results_equal_those_of_torch(batch_first: bool, need_weights: bool) -> None:
    torch = pytest.importorskip("torch")
    module = make_module(batch_first=batch_first)
    theirs = torch.nn.MultiheadAttention(E, H, batch_first=batch_first, dtype=torch.float64)
    parameters = module.named_parameters()
    theirs.load_state_dict({n: torch.from_numpy(v.numpy()) for n, v in parameters.items()})
    query_shape = (B, L, E) if batch_first else (L, B, E)
    key_shape = (B, S, E) if batch_first else (S, B, E)
    x, y = RNG.standard_normal(query_shape), RNG.standard_normal(key_shape)
    # In a boolean mask, True excludes a key. The four samples have 5, 3, 4 and 1 keys.
    padding = np.arange(S) >= np.array([[5], [3], [4], [1]])
    # Excludes the keys from position i + 2 on for query i.
    later = np.triu(np.ones((L, S), bool), 2)
    additive = RNG.standard_normal((B * H, L, S))
    for key_padding, attn in itertools.product((None, padding), (None, later, additive)):
        if key_padding is not None and attn is additive:
            continue  # torch warns of a boolean mask with an additive mask
        masks = {"key_padding_mask": key_padding, "attn_mask": attn}
        our_masks = {n: None if m is None else tc.tensor(m) for n, m in masks.items()}
        their_masks = {n: None if m is None else torch.from_numpy(m) for n, m in masks.items()}
        found = module(
            tc.tensor(x), tc.tensor(y), tc.tensor(y), need_weights=need_weights, **our_masks
        )
        a, b = torch.from_numpy(x), torch.from_numpy(y)
        expected = theirs(a, b, b, need_weights=need_weights, **their_masks)
        # Each is a pair: the output and the attention weights.
        for ours, wanted in zip(found, expected, strict=True):
            # Without `need_weights`, torch's weights are None.
            if need_weights or wanted is not None:
                np.testing.assert_allclose(
                    ours.numpy(), wanted.detach().numpy(), rtol=1e-9, atol=1e-9
                )
