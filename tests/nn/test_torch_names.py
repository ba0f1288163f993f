"""Layers, losses, functions and methods that have the same names and results as in torch.

Names that this library does not have raise errors that suggest an alternative.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import nn

RNG = np.random.default_rng(3)
X = RNG.standard_normal((2, 3, 8, 8)).astype(np.float32)
Y = RNG.standard_normal((2, 3, 8, 8)).astype(np.float32)


@pytest.mark.parametrize(
    "make",  # each function takes the module `nn` of this library or of torch
    [
        lambda n: n.LeakyReLU(0.2, inplace=True),
        lambda n: n.LeakyReLU(),
        lambda n: n.ReLU(inplace=True),
        lambda n: n.SiLU(True),
        lambda n: n.ELU(0.7),
        lambda n: n.Softplus(2.0),
        lambda n: n.LogSoftmax(dim=1),
        lambda n: n.MaxPool2d(2),
        lambda n: n.MaxPool2d(3, stride=2, padding=1),
        lambda n: n.AvgPool2d((2, 4)),
    ],
    ids=[
        "LeakyReLU in place",
        "LeakyReLU",
        "ReLU",
        "SiLU",
        "ELU",
        "Softplus",
        "LogSoftmax",
        "MaxPool2d",
        "padded MaxPool2d",
        "AvgPool2d",
    ],
)
def test_layers_equal_those_of_torch(make: Callable[[Any], Any]) -> None:
    torch = pytest.importorskip("torch")
    found, expected = make(nn)(tc.tensor(X)), make(torch.nn)(torch.tensor(X))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
    assert repr(make(nn)).startswith(type(make(torch.nn)).__name__)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "make",  # n is the module `nn` of this library or of torch, r the reduction
    [
        lambda n, r: n.MSELoss(reduction=r),
        lambda n, r: n.L1Loss(reduction=r),
        lambda n, r: n.SmoothL1Loss(reduction=r, beta=0.5),
        lambda n, r: n.HuberLoss(reduction=r, delta=0.5),
        lambda n, r: n.BCEWithLogitsLoss(reduction=r),
    ],
    ids=["mse", "l1", "smooth_l1", "huber", "bce"],
)
def test_losses_equal_those_of_torch(make: Callable[[Any, str], Any], reduction: str) -> None:
    torch = pytest.importorskip("torch")
    target = np.abs(Y) / 4  # from 0 to about 1: BCEWithLogitsLoss takes probabilities
    found = make(nn, reduction)(tc.tensor(X), tc.tensor(target))
    expected = make(torch.nn, reduction)(torch.tensor(X), torch.tensor(target))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)


def test_cross_entropies_equal_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    logits, classes = X.reshape(-1, 8), RNG.integers(0, 8, X.size // 8)
    classes[::5] = 7  # so that some targets are equal to `ignore_index` below
    for settings in ({"label_smoothing": 0.1}, {"ignore_index": 7, "reduction": "sum"}):
        found = nn.CrossEntropyLoss(**settings)(tc.tensor(logits), tc.tensor(classes))
        expected = torch.nn.CrossEntropyLoss(**settings)(
            torch.tensor(logits), torch.tensor(classes)
        )
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("settings", [{"dilation": 2}, {"groups": 3}, {"bias": False}], ids=str)
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_paddings_by_name_equal_those_of_torch(settings: dict[str, Any], padding: str) -> None:
    torch = pytest.importorskip("torch")
    ours = nn.Conv2d(3, 6, (1, 3), padding=padding, **settings)
    theirs = torch.nn.Conv2d(3, 6, (1, 3), padding=padding, **settings)
    state = ours.state_dict()
    theirs.load_state_dict({name: torch.from_numpy(v.numpy()) for name, v in state.items()})
    found, expected = ours(tc.tensor(X)), theirs(torch.tensor(X)).detach()
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kernel_size": 3, "stride": 2, "padding": "same"},
            'padding is "same", expected stride 1',
        ),
        ({"kernel_size": 4, "padding": "same"}, "an even number of zeros"),
        ({"kernel_size": 3, "padding": "full"}, "padding is 'full', expected numbers"),
    ],
    ids=["stride", "even kernel", "unknown name"],
)
def test_paddings_that_do_not_fit_are_reported(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(tc.ArgumentError, match=message):
        nn.Conv2d(1, 1, **settings)


def test_an_unknown_reduction_is_reported() -> None:
    with pytest.raises(tc.ArgumentError, match="MSELoss: reduction is 'avg', expected"):
        nn.MSELoss("avg")


class Net(nn.Module):
    scale: tc.Tensor
    mask: tc.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("scale", tc.full((2,), 2.0))
        self.register_buffer("mask", tc.ones(2), persistent=False)

    def forward(self, x: tc.Tensor) -> tc.Tensor:
        return self.layer(x) * self.scale * self.mask


def test_buffers_are_part_of_a_module_but_are_not_trained() -> None:
    net = Net()
    assert set(net.state_dict()) == {"layer.weight", "layer.bias", "scale"}
    assert net.load_state_dict({**net.state_dict(), "scale": tc.ones(2)}) == ([], [])
    assert net.scale.tolist() == [1.0, 1.0]
    net.requires_grad_(False).requires_grad_(True)  # does not make the buffers trainable
    assert set(net.named_parameters()) == {"layer.weight", "layer.bias"}
    # `to` converts the module in place, with both buffers.
    assert {str(net.to("f64").mask.dtype), str(net.scale.dtype)} == {"f64"}
    assert net(tc.ones(1, 2, dtype="f64")).shape == (1, 2)
    assert not Net._buffers  # the class, unlike its instance, has no buffers


def test_wrong_names_of_buffers_are_reported() -> None:
    net = Net()
    for name in ("_hidden", "a.b"):
        with pytest.raises(tc.ArgumentError, match=f"register_buffer: the name is '{name}'"):
            net.register_buffer(name, tc.ones(2))
    with pytest.raises(tc.ArgumentError, match="there is an attribute 'scale' already"):
        net.register_buffer("scale", tc.ones(2))


def test_apply_calls_a_function_with_every_module() -> None:
    seen: list[nn.Module] = []
    net = nn.Sequential(Net(), nn.ReLU())
    assert net.apply(seen.append) is net
    assert {id(module) for module in seen} == {id(module) for module in net.modules()}
    assert seen[-1] is net  # a module comes after the modules inside


def test_a_buffer_belongs_to_one_instance_of_a_class() -> None:
    first, second = Net(), Net()
    first.register_buffer("other", tc.ones(1))
    assert "other" in first.state_dict()
    assert "other" not in second.state_dict()


@pytest.mark.parametrize(
    ("find", "advice"),
    [
        (lambda: nn.BatchNorm2d, "use GroupNorm"),
        (lambda: nn.TransformerEncoderLayer, "MultiheadAttention, LayerNorm and Linear"),
        (lambda: nn.Nothing, "has no 'Nothing'$"),  # not in torch either: no advice follows
        (lambda: Net().register_forward_hook, "write a subclass"),
        (lambda: Net().cuda, r"use to\("),
        (lambda: Net().nothing, "has no attribute 'nothing'$"),
        (lambda: tc.autograd, r"use tc\.grad"),
        (lambda: tc.from_numpy, r"use tc\.tensor"),
        (lambda: tc.bmm, "use a @ b"),
        (lambda: nn.functional.batch_norm, "use group_norm"),
        (lambda: tc.optim.SGD([tc.Var(tc.zeros(1))], lr=0.1).add_param_group, "give all groups"),
    ],
    ids=[
        "BatchNorm2d",
        "TransformerEncoderLayer",
        "Nothing",
        "register_forward_hook",
        "cuda",
        "nothing",
        "autograd",
        "from_numpy",
        "bmm",
        "batch_norm",
        "add_param_group",
    ],
)
def test_errors_for_missing_names_of_torch_suggest_alternatives(
    find: Callable[[], object], advice: str
) -> None:
    with pytest.raises(AttributeError, match=advice):
        find()


def test_functions_take_the_shape_or_the_dtype_of_another_tensor() -> None:
    x = tc.ones(2, 3, dtype="f64")
    for result in (tc.rand_like(x), tc.randn_like(x), tc.full_like(x, 3.0), x.new_zeros(2, 3)):
        assert (result.shape, str(result.dtype)) == (x.shape, "f64")
    assert tc.full_like(x, 3, dtype="i64").tolist() == [[3] * 3] * 2
    generator = tc.Generator().manual_seed(2)
    assert tc.randn_like(x, generator=generator).tolist() == (
        tc.randn(2, 3, dtype="f64", generator=generator.manual_seed(2)).tolist()
    )
    assert x.new_ones((4,)).tolist() == [1.0] * 4
    assert tc.ones(3).type_as(x).dtype == "f64"
    assert tc.ones(3).expand_as(x).shape == (2, 3)
    assert tc.ones(6).view_as(x).shape == (2, 3)
    assert tc.flatten(x).shape == (6,)
    with pytest.raises(TypeError, match="randn_like: input is int, expected a Tensor"):
        tc.randn_like(3)  # type: ignore[arg-type]


def test_zero_grad_accepts_the_argument_of_torch() -> None:
    net = nn.Linear(2, 2)
    optimizer = tc.optim.SGD(net.parameters(), lr=0.1)
    for clear in (optimizer.zero_grad, net.zero_grad):
        net(tc.ones(1, 2)).sum().backward()
        assert net.weight.grad is not None
        clear(set_to_none=True)
        assert net.weight.grad is None
