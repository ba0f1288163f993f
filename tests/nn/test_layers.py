"""Layers with torch's constructors; containers; methods that act on all tensors of a module."""

import textwrap

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import nn
from trainable_candle.nn import functional as F

# Layers, and the shapes of their parameters.
SHAPES = {
    "Embedding": (nn.Embedding(5, 3), {"weight": (5, 3)}),
    "Conv2d": (nn.Conv2d(4, 6, (3, 1), groups=2), {"weight": (6, 2, 3, 1), "bias": (6,)}),
    "LayerNorm": (nn.LayerNorm([2, 3]), {"weight": (2, 3), "bias": (2, 3)}),
    "LayerNorm without bias": (nn.LayerNorm(3, bias=False), {"weight": (3,)}),
    "LayerNorm without parameters": (nn.LayerNorm(3, elementwise_affine=False), {}),
    "RMSNorm": (nn.RMSNorm(4), {"weight": (4,)}),
    "GroupNorm": (nn.GroupNorm(2, 4), {"weight": (4,), "bias": (4,)}),
    "GELU": (nn.GELU(), {}),
}


@pytest.mark.parametrize("layer", SHAPES)
def test_parameters_have_the_names_and_shapes_of_torch(layer: str) -> None:
    module, shapes = SHAPES[layer]
    assert {name: var.shape for name, var in module.named_parameters().items()} == shapes


def test_layers_equal_their_functional_forms() -> None:
    tc.manual_seed(0)
    image, tokens = tc.randn(2, 4, 5, 6), tc.randn(2, 3, 4)
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=(1, 2), groups=2)
    layer, rms, group = nn.LayerNorm((3, 4), eps=1e-3), nn.RMSNorm(4), nn.GroupNorm(2, 4)
    for var in (layer.weight, layer.bias, rms.weight, group.weight, group.bias):
        var.set(tc.randn(*var.shape))
    table = nn.Embedding(5, 3)
    ids = tc.tensor([[4, 0, 4]])
    cases = [
        (conv(image), F.conv2d(image, conv.weight, conv.bias,
                         stride=2, padding=1, dilation=(1, 2), groups=2)),
        (layer(tokens), F.layer_norm(tokens, (3, 4), layer.weight, layer.bias, eps=1e-3)),
        (rms(tokens), F.rms_norm(tokens, 4, rms.weight)),
        (group(image), F.group_norm(image, 2, group.weight, group.bias)),
        (table(ids), F.embedding(ids, table.weight)),
        (nn.Softmax(1)(tokens), tokens.softmax(1)),
        (nn.GELU("tanh")(tokens), tokens.gelu("tanh")),
        (nn.Flatten()(image), image.reshape(2, 4 * 5 * 6)),
        (nn.Sequential(nn.ReLU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Identity())(tokens),
         tokens.relu().silu().tanh().sigmoid()),
    ]  # fmt: skip
    for found, expected in cases:
        np.testing.assert_array_equal(found.detach().numpy(), expected.detach().numpy())


def test_initial_values_are_those_of_torch() -> None:
    tc.manual_seed(0)
    conv = nn.Conv2d(8, 64, 3, groups=2)
    bound = 1 / np.sqrt(4 * 9)  # the fan-in: 4 channels per group, 3 x 3 weights each
    # Uniform from -bound to bound, so the standard deviation is bound / sqrt(3).
    for values in (conv.weight.numpy(), conv.bias.numpy()):
        assert np.abs(values).max() <= bound
        assert np.abs(values).max() > 0.9 * bound
        assert abs(values.std() - bound / np.sqrt(3)) < 0.2 * bound
    # An embedding's values have mean 0 and standard deviation 1.
    table = nn.Embedding(100, 50).weight.numpy()
    assert abs(table.mean()) < 0.05
    assert abs(table.std() - 1) < 0.05


def test_dropout_has_an_effect_only_in_training() -> None:
    x = tc.ones(1000)
    dropout = nn.Dropout(0.25)
    kept_fraction = (dropout(x).numpy() > 0).mean()
    assert 0.6 < kept_fraction < 0.9
    assert dropout.eval()(x).tolist() == x.tolist()


class Net(nn.Module):
    """A classifier of 8 x 8 images, of which the convolution makes 4 channels of 6 x 6 pixels."""

    def __init__(self) -> None:
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten())
        self.heads = {"digit": nn.Linear.init(4 * 6 * 6, 10)}
        self.offset = tc.tensor([1, 2])  # integers, not used by `forward`

    def forward(self, x: tc.Tensor) -> tc.Tensor:
        return self.heads["digit"](self.body(x))


def test_a_network_learns() -> None:
    tc.manual_seed(0)
    net = Net()
    x, y = tc.randn(8, 1, 8, 8), tc.arange(8)
    optimizer = tc.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_containers_can_be_used_like_lists_but_take_only_modules() -> None:
    items = nn.ModuleList([nn.ReLU()]).append(nn.Linear.init(2, 2))
    assert (len(items), type(items[1])) == (2, nn.Linear)
    assert list(items.named_parameters()) == ["1.weight", "1.bias"]
    items[0] = nn.Tanh()
    assert [type(item) for item in items] == [nn.Tanh, nn.Linear]
    net = nn.Sequential(nn.ReLU(), nn.SiLU(), nn.Tanh())
    assert isinstance(net[1:], nn.Sequential)
    assert [type(item) for item in net[1:]] == [nn.SiLU, nn.Tanh]
    assert [type(module) for module in net.modules()] == [nn.Sequential, nn.ReLU, nn.SiLU, nn.Tanh]
    with pytest.raises(TypeError, match="Sequential: found function, expected a Module"):
        nn.Sequential(F.relu)
    with pytest.raises(TypeError, match="ModuleList: found int, expected a Module"):
        items[0] = 3


def test_repr_lists_the_modules_inside() -> None:
    net = Net()
    net.body[0] = nn.Embedding(3, 2)
    expected = """
        Net(
          (body): Sequential(
            (0): Embedding(3, 2)
            (1): GroupNorm(2, 4, eps=1e-05)
            (2): GELU(approximate='none')
            (3): Flatten()
          )
          (heads.digit): Linear(144, 10, bias=True)
        )"""
    assert repr(net) == textwrap.dedent(expected).lstrip()
    conv = nn.Conv2d(1, 4, 3)
    assert repr(conv).startswith("Conv2d(1, 4, kernel_size=(3, 3), stride=(1, 1), padding=(0, 0)")
    lora = nn.LoRALinear(tc.zeros(6, 4), rank=2, alpha=4)
    assert repr(lora) == "LoRALinear(4, 6, rank=2, scale=2, bias=False)"


def test_to_changes_only_floating_point_tensors_and_rejects_wrong_arguments() -> None:
    net = Net()
    x = tc.randn(1, 1, 8, 8)
    expected = net(x).numpy()
    assert net.to("f64") is net
    assert {str(var.dtype) for var in net.parameters()} == {"f64"}
    assert (str(net.offset.dtype), net.offset.tolist()) == ("i64", [1, 2])
    np.testing.assert_allclose(net(x.to("f64")).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert str(net.to(device="cpu", dtype=tc.bfloat16).offset.dtype) == "i64"
    assert {str(var.dtype) for var in net.to("cpu").parameters()} == {"bf16"}
    with pytest.raises(tc.errors.ArgumentError, match="found 'f32' and 'f16', expected one"):
        net.to("f32", dtype="f16")
    with pytest.raises(tc.errors.ArgumentError, match="found 'cpu' and 'cpu', expected one"):
        net.to("cpu", device="cpu")
    with pytest.raises(tc.errors.DTypeError, match="the dtype is i64, expected one of f32"):
        net.to("i64")
    # A name that is no device counts as a dtype.
    with pytest.raises(tc.errors.DTypeError):
        net.to("gpu")


def test_requires_grad_freezes_and_thaws() -> None:
    net = Net()
    names = list(net.named_parameters())
    before = net.heads["digit"].weight.tolist()
    assert net.requires_grad_(False).parameters() == []
    assert list(net.requires_grad_().named_parameters()) == names
    assert net.heads["digit"].weight.tolist() == before
    partly_frozen = Net()
    partly_frozen.body.requires_grad_(False)
    assert list(partly_frozen.named_parameters()) == ["heads.digit.weight", "heads.digit.bias"]


def test_shared_variables_stay_shared() -> None:
    net = nn.Sequential(nn.Linear.init(3, 3), nn.Linear.init(3, 3))
    net[1].weight = net[0].weight
    net.to("f64").requires_grad_(False).requires_grad_()
    assert net[1].weight is net[0].weight
    assert len(net.parameters()) == 3  # the shared weight and two biases


def test_wrong_arguments_are_rejected() -> None:
    wrong = [
        (lambda: nn.Conv2d(3, 4, 3, groups=2), "groups is 2, expected a divisor of in_channels, 3"),
        (lambda: nn.Conv2d(2, 4, 0), "kernel_size is 0, expected at least 1"),
        (lambda: nn.Conv2d(2, 4, 3, padding=(1, 2, 3)), "padding is .*, expected one or two"),
        (lambda: nn.GroupNorm(3, 4), "num_groups is 3, expected a divisor of num_channels, 4"),
        (lambda: nn.Dropout(1.5), "p is 1.5, expected a number from 0 to 1"),
        (lambda: nn.GELU("erf"), "approximate is 'erf', expected"),
        (lambda: Net().requires_grad_(1), "requires_grad_: found 1, expected True or False"),
    ]
    for make, message in wrong:
        with pytest.raises(tc.errors.ArgumentError, match=message):
            make()


def test_to_rejects_a_variable_in_a_tuple_and_changes_nothing() -> None:
    net = Net()
    net.pair = (tc.Var(1.0),)
    with pytest.raises(tc.errors.ArgumentError, match=r"pair.0 is in a tuple, .* use a list"):
        net.to("f64")
    assert {str(var.dtype) for var in net.parameters()} == {"f32"}
