"""Classes and functions under torch's names, against torch's formulas, and torch where it is."""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, DeviceError, ShapeError
from trainable_candle.nn import init
from trainable_candle.utils.data import DataLoader, TensorDataset, default_collate


def var(*shape: int) -> tc.Var:
    return tc.Var(tc.zeros(*shape))


# Modes and devices.


def test_the_mode_is_set_at_once_and_restored() -> None:
    v = var(2)
    with tc.set_grad_enabled(False):
        assert not tc.is_grad_enabled()
        assert not (v * 2).requires_grad
    assert tc.is_grad_enabled()
    tc.set_grad_enabled(False)
    try:
        with tc.set_grad_enabled(True):
            assert (v * 2).requires_grad
        assert not tc.is_grad_enabled()
    finally:
        tc.set_grad_enabled(True)


def test_inference_records_nothing() -> None:
    @tc.inference_mode()
    def evaluated(v: tc.Var) -> bool:
        return (v * 2).requires_grad

    assert not evaluated(var(2))
    with tc.inference_mode(), tc.inference_mode(False):
        assert tc.is_grad_enabled()
    assert tc.is_grad_enabled()


def test_a_device_is_its_name() -> None:
    device = tc.device("cuda", 1)
    assert device == "cuda:1" == str(device)
    assert (device.type, device.index) == ("cuda", 1)
    assert (tc.device("cpu").type, tc.device("cpu").index) == ("cpu", None)
    assert tc.zeros(2, device=tc.device("cpu")).device == tc.device("cpu")
    assert tc.zeros(2).to(tc.device("cpu")).device == "cpu"
    for wrong in ("tpu", "cuda:x", ""):
        with pytest.raises(DeviceError, match="unknown device"):
            tc.device(wrong)


# Random numbers.


@pytest.mark.parametrize("draw", [tc.randn, tc.rand])
def test_a_generator_is_a_stream_of_its_own(draw: Callable[..., tc.Tensor]) -> None:
    tc.manual_seed(3)
    expected = [draw(4).tolist() for _ in range(2)]
    tc.manual_seed(7)
    generator = tc.Generator().manual_seed(3)
    before = tc.get_rng_state()
    found = [draw(4, generator=generator).tolist() for _ in range(2)]
    assert found == expected
    assert tc.get_rng_state() == before
    state = generator.get_state()
    third = draw(4, generator=generator).tolist()
    assert draw(4, generator=tc.Generator().set_state(state)).tolist() == third
    with pytest.raises(TypeError, match="generator is 3, expected a "):
        draw(4, generator=3)


def test_integers_are_drawn_from_a_generator() -> None:
    draws = [tc.randint(0, 100, (9,), generator=tc.Generator().manual_seed(1)) for _ in range(2)]
    assert draws[0].tolist() == draws[1].tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda: tc.randn(2, 3, requires_grad=True),
        lambda: tc.rand(2, 3, requires_grad=True),
        lambda: tc.zeros(2, 3, requires_grad=True),
        lambda: tc.ones(2, 3, requires_grad=True),
        lambda: tc.full((2, 3), 1.5, requires_grad=True),
        lambda: tc.tensor([[1.0] * 3] * 2, requires_grad=True),
    ],
)
def test_what_requires_a_gradient_is_a_variable(make: Callable[[], tc.Var]) -> None:
    made = make()
    assert isinstance(made, tc.Var)
    (made * 3).sum().backward()
    assert made.grad is not None
    assert made.grad.tolist() == [[3.0] * 3] * 2


# Initial values.

WIDE = (200, 300)


@pytest.mark.parametrize(
    ("fill", "deviation", "bound"),
    [
        (lambda v: init.uniform_(v, -3, 3), math.sqrt(3), 3.0),
        (lambda v: init.normal_(v, 0, 2), 2.0, None),
        (lambda v: init.xavier_uniform_(v, 2.0), 2 * math.sqrt(2 / 500), 2 * math.sqrt(6 / 500)),
        (init.xavier_normal_, math.sqrt(2 / 500), None),
        (
            lambda v: init.kaiming_uniform_(v, math.sqrt(5)),
            1 / math.sqrt(3 * 300),
            1 / math.sqrt(300),
        ),
        (
            lambda v: init.kaiming_normal_(v, mode="fan_out", nonlinearity="relu"),
            math.sqrt(2 / 200),
            None,
        ),
        (init.trunc_normal_, 0.8796, 2.0),
    ],
)
def test_initial_values_have_their_deviation(
    fill: Callable[[tc.Var], tc.Tensor], deviation: float, bound: float | None
) -> None:
    tc.manual_seed(0)
    v = var(*WIDE)
    assert fill(v) is v
    values = v.numpy()
    assert values.std() == pytest.approx(deviation, rel=0.02)
    assert abs(values.mean()) < 0.02 * deviation
    if bound is not None:
        assert 0.99 * bound < np.abs(values).max() <= bound


def test_constant_values() -> None:
    assert init.zeros_(init.ones_(var(2, 2))).tolist() == [[0.0, 0.0]] * 2
    assert init.constant_(var(2), 1.5).tolist() == [1.5, 1.5]
    assert init.eye_(var(2, 3)).tolist() == [[1, 0, 0], [0, 1, 0]]
    draws = [init.normal_(var(5), generator=tc.Generator().manual_seed(2)) for _ in range(2)]
    assert draws[0].tolist() == draws[1].tolist()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: init.normal_(tc.zeros(3)), TypeError, "found Tensor, expected a Var"),
        (lambda: init.xavier_uniform_(var(3)), ShapeError, "has no fan"),
        (lambda: init.kaiming_normal_(var(3, 3), mode="in"), ArgumentError, "mode is 'in'"),
        (lambda: init.calculate_gain("gelu"), ArgumentError, "nonlinearity is 'gelu'"),
        (lambda: init.uniform_(var(3), 2, 1), ArgumentError, "the smaller bound first"),
        (lambda: init.normal_(var(3), 0, -1), ArgumentError, "std is -1"),
        (lambda: init.trunc_normal_(var(3), 9, 1), ArgumentError, "nearly no value"),
        (lambda: init.eye_(var(3)), ShapeError, "expected a matrix"),
    ],
)
def test_wrong_initial_values_are_errors(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    "name", ["linear", "conv2d", "sigmoid", "tanh", "relu", "leaky_relu", "selu"]
)
def test_gains_are_torchs(name: str) -> None:
    torch = pytest.importorskip("torch")
    assert init.calculate_gain(name) == pytest.approx(torch.nn.init.calculate_gain(name))


# Attention.


def attention(**options: Any) -> tc.nn.MultiheadAttention:
    tc.manual_seed(0)
    made = tc.nn.MultiheadAttention(8, 2, **options)
    if made.in_proj_bias is not None:
        init.normal_(made.in_proj_bias)
    return made


def by_hand(
    layer: tc.nn.MultiheadAttention, q: Any, k: Any, v: Any, added: Any = 0.0
) -> tuple[Any, Any]:
    """The formula in float64; inputs are (B, S, E)."""
    weight = layer.in_proj_weight.numpy().astype(float)
    bias = np.zeros(24) if layer.in_proj_bias is None else layer.in_proj_bias.numpy().astype(float)
    parts = []
    for index, x in enumerate((q, k, v)):
        rows = slice(8 * index, 8 * index + 8)
        y = x @ weight[rows].T + bias[rows]
        parts.append(y.reshape(*y.shape[:2], 2, 4).transpose(0, 2, 1, 3))
    scores = parts[0] @ parts[1].transpose(0, 1, 3, 2) / 2 + added
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = (weights @ parts[2]).transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[1], 8)
    out = layer.out_proj
    shift = 0 if out.bias is None else out.bias.numpy()
    return mixed @ out.weight.numpy().astype(float).T + shift, weights


RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((3, 5, 8)), RNG.standard_normal((3, 7, 8))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_follows_the_formula(bias: bool, batch_first: bool, need_weights: bool) -> None:
    layer = attention(bias=bias, batch_first=batch_first)
    q, k = (tc.tensor(x.astype(np.float32)) for x in (Q, K))
    if not batch_first:
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    found, weights = layer(q, k, k, need_weights=need_weights)
    found = found if batch_first else found.transpose(0, 1)
    expected, expected_weights = by_hand(layer, Q, K, K)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)
    if need_weights:
        np.testing.assert_allclose(weights.numpy(), expected_weights.mean(1), atol=2e-6)
    else:
        assert weights is None


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["padding", "mask", "numbers", "each head", "causal"])
def test_masks_hide_what_torchs_hide(kind: str, need_weights: bool) -> None:
    layer = attention(batch_first=True)
    q, k = (tc.tensor(x.astype(np.float32)) for x in (Q, Q if kind == "causal" else K))
    options: dict[str, Any] = {}
    if kind == "padding":
        hidden = RNG.random((3, 7)) < 0.4
        hidden[:, 0] = False
        options["key_padding_mask"] = tc.tensor(hidden)
        added = np.where(hidden[:, None, None], -np.inf, 0)
    elif kind == "mask":
        hidden = RNG.random((5, 7)) < 0.4
        hidden[:, 0] = False
        options["attn_mask"] = tc.tensor(hidden)
        added = np.where(hidden, -np.inf, 0)
    elif kind == "numbers":
        added = RNG.standard_normal((5, 7)).astype(np.float32)
        options["attn_mask"] = tc.tensor(added)
    elif kind == "each head":
        added = RNG.standard_normal((6, 5, 7)).astype(np.float32)
        options["attn_mask"] = tc.tensor(added)
        added = added.reshape(3, 2, 5, 7)
    else:
        options["is_causal"] = True
        added = np.where(np.tril(np.ones((5, 5))) == 0, -np.inf, 0)
    found, _ = layer(q, k, k, need_weights=need_weights, **options)
    keys = Q if kind == "causal" else K
    np.testing.assert_allclose(found.numpy(), by_hand(layer, Q, keys, keys, added)[0], atol=2e-6)


def test_attention_trains_and_drops() -> None:
    layer = attention(batch_first=True, dropout=0.5)
    x = tc.tensor(Q.astype(np.float32))
    first, second = (layer(x, x, x)[0] for _ in range(2))
    assert first.tolist() != second.tolist()
    (first * first).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    layer.eval()
    np.testing.assert_allclose(
        layer(x, x, x)[0].detach().numpy(), by_hand(layer, Q, Q, Q)[0], atol=2e-6
    )
    with pytest.raises(ArgumentError, match="3 heads cannot share 8 features"):
        tc.nn.MultiheadAttention(8, 3)
    with pytest.raises(ShapeError, match="found 2 dimensions"):
        layer(x[0], x[0], x[0])


# Data.


class Squares:
    """Items that say which thread read them."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[float, int]:
        self.threads.add(threading.current_thread().name)
        return float(index), index * index


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_are_the_same_with_any_number_of_threads(workers: int, drop_last: bool) -> None:
    data = Squares()
    loader = DataLoader(data, batch_size=4, num_workers=workers, drop_last=drop_last)
    batches = list(loader)
    assert len(batches) == len(loader) == (5 if drop_last else 6)
    assert [x for _, squares in batches for x in squares.tolist()] == [
        i * i for i in range(20 if drop_last else 23)
    ]
    assert str(batches[0][0].dtype) == "f32"
    assert any(name.startswith("DataLoader") for name in data.threads) == (workers > 0)


def test_each_pass_has_another_order_that_the_seed_repeats() -> None:
    def orders() -> list[list[int]]:
        generator = tc.Generator().manual_seed(5)
        loader = DataLoader(range(30), batch_size=7, shuffle=True, generator=generator)
        return [[x for batch in loader for x in batch.tolist()] for _ in range(2)]

    first, second = orders()
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    assert orders() == [first, second]


def test_samplers_single_items_and_own_batches() -> None:
    assert [b.tolist() for b in DataLoader(range(9), 2, sampler=[5, 3, 1])] == [[5, 3], [1]]
    assert list(DataLoader(["a", "b"], batch_size=None)) == ["a", "b"]
    assert len(DataLoader(range(9), None)) == 9
    assert list(DataLoader(range(5), 2, collate_fn=sum)) == [1, 5, 4]


def test_an_error_of_an_item_reaches_the_loop() -> None:
    class Broken(Squares):
        def __getitem__(self, index: int) -> tuple[float, int]:
            if index == 9:
                raise OSError("cannot read 9")
            return super().__getitem__(index)

    for workers in (0, 2):
        with pytest.raises(OSError, match="cannot read 9"):
            list(DataLoader(Broken(), batch_size=4, num_workers=workers))


def test_items_are_joined_entry_by_entry() -> None:
    items = [{"x": np.ones(3) * i, "y": (tc.ones(2) * i, "a"), "z": i > 0} for i in range(2)]
    found = default_collate(items)
    assert found["x"].tolist() == [[0.0] * 3, [1.0] * 3]
    assert found["y"][0].shape == (2, 2)
    assert found["y"][1] == ["a", "a"]
    assert found["z"].tolist() == [0, 1]
    rows = TensorDataset(tc.ones(4, 2), tc.arange(4))
    assert [tuple(part.shape) for part in next(iter(DataLoader(rows, 3)))] == [(3, 2), (3,)]
    with pytest.raises(ShapeError, match="expected one first size"):
        TensorDataset(tc.ones(4), tc.ones(3))
    with pytest.raises(ArgumentError, match="an item is object"):
        default_collate([object()])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"prefetch_factor": 0}, "prefetch_factor is 0"),
        ({"sampler": [0], "shuffle": True}, "a sampler and shuffle"),
    ],
)
def test_wrong_loaders_are_errors(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        DataLoader(range(3), **options)


def test_statistics_take_numpys_and_torchs_words() -> None:
    x = tc.tensor(Q)
    np.testing.assert_allclose(x.var(dim=-1, unbiased=False).numpy(), Q.var(-1))
    np.testing.assert_allclose(x.std(axis=0, unbiased=True).numpy(), Q.std(0, ddof=1))
    np.testing.assert_allclose(x.sum(axis=(0, 1)).numpy(), Q.sum((0, 1)))
    np.testing.assert_allclose(x.max(axis=1, keepdim=True).numpy(), Q.max(1, keepdims=True))
    with pytest.raises(ArgumentError, match="dim and axis, which mean the same"):
        x.sum(0, axis=1)
