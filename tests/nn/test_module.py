"""`nn.Module`: names of tensors, states, and the modes of training and evaluation."""

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import nn


class Block(nn.Module):
    def __init__(self, width):
        self.fc = nn.Linear.init(width, width)
        self.scale = tc.ones(width)  # a tensor that is no parameter
        self._hidden = tc.zeros(3)  # has no name among the tensors, because it begins with `_`

    def forward(self, x):
        return self.fc(x) * self.scale


class Net(nn.Module):
    def __init__(self):
        self.blocks = [Block(4), Block(4)]
        self.heads = {"out": nn.Linear.init(4, 2, bias=False)}
        self.gain = tc.Var(2.0)
        self.name = "net"

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.heads["out"](x) * self.gain


# The names of the tensors of a `Net`; all but the two `scale` are parameters.
NAMES = [
    "blocks.0.fc.weight",
    "blocks.0.fc.bias",
    "blocks.0.scale",
    "blocks.1.fc.weight",
    "blocks.1.fc.bias",
    "blocks.1.scale",
    "heads.out.weight",
    "gain",
]


def test_tensors_parameters_and_modules_have_names():
    net = Net()
    assert list(net.named_tensors()) == NAMES
    assert list(net.named_parameters()) == [name for name in NAMES if "scale" not in name]
    assert [name for name, _ in net.named_modules()] == [
        "",
        "blocks.0",
        "blocks.0.fc",
        "blocks.1",
        "blocks.1.fc",
        "heads.out",
    ]
    assert all(isinstance(p, tc.Var) for p in net.parameters())


def test_gradients_reach_every_parameter():
    net = Net()
    net(tc.ones(3, 4)).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_shared_parameters_and_modules_come_once():
    net = Net()
    net.tied = net.blocks[0].fc.weight
    assert len(net.parameters()) == 6  # as many as without `tied`
    net.again = net.blocks[1]
    assert len(net.parameters()) == 6
    net.parent = net
    assert len(net.parameters()) == 6


def test_train_and_eval_set_the_mode_of_all_modules():
    net = Net()
    assert net.training
    assert net.eval() is net
    assert not any(module.training for _, module in net.named_modules())
    net.train()
    assert all(module.training for _, module in net.named_modules())


def test_a_state_is_a_snapshot():
    net = Net()
    state = net.state_dict()
    assert list(state) == NAMES
    before = state["gain"].item()
    net.gain.set(tc.tensor(5.0))
    assert state["gain"].item() == before


def test_a_loaded_state_gives_the_same_results():
    first, second = Net(), Net()
    first.blocks[0].scale = tc.full((4,), 3.0)
    gain = second.gain
    result = second.load_state_dict(first.state_dict())
    assert result == ([], [])  # the missing and the unexpected names
    assert second.gain is gain  # a variable gets the value in place
    x = tc.randn(5, 4)
    np.testing.assert_array_equal(first(x).numpy(), second(x).numpy())
    assert second.blocks[0].scale.tolist() == [3, 3, 3, 3]
    arrays = {name: tensor.numpy() for name, tensor in first.state_dict().items()}
    assert Net().load_state_dict(arrays).missing == []


def test_a_state_that_does_not_fit_changes_nothing_unless_strict_is_false():
    net = Net()
    before = net.state_dict()
    state = {name: tc.ones(*t.shape) for name, t in before.items()}
    with pytest.raises(
        tc.ArgumentError,
        match="load_state_dict: missing: gain; unexpected: extra; pass strict=False",
    ):
        net.load_state_dict(
            {**{k: v for k, v in state.items() if k != "gain"}, "extra": tc.ones(1)}
        )
    with pytest.raises(
        tc.ShapeError, match=r"load_state_dict: gain has shape \(\), the state has \(3,\)"
    ):
        net.load_state_dict({**state, "gain": tc.ones(3)})
    with pytest.raises(tc.DTypeError, match="load_state_dict: gain is f32, the state has f64"):
        net.load_state_dict({**state, "gain": tc.tensor(1.0, dtype="f64")})
    for name, tensor in net.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), before[name].numpy())
    result = net.load_state_dict({"gain": tc.tensor(9.0), "extra": tc.ones(1)}, strict=False)
    assert result.missing == [name for name in NAMES if name != "gain"]
    assert result.unexpected == ["extra"]
    assert net.gain.item() == 9


def test_a_state_is_loaded_into_variables_but_not_tensors_in_a_tuple() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            self.gain = tc.Var(2.0)
            self.pair = (tc.Var(3.0), tc.ones(2))

    net = Pair()
    state = {"gain": tc.tensor(9.0), "pair.0": tc.tensor(9.0), "pair.1": tc.zeros(2)}
    with pytest.raises(tc.ArgumentError, match=r"load_state_dict: pair.1 is in a tuple, .* a list"):
        net.load_state_dict(state)
    assert [float(net.gain), float(net.pair[0]), net.pair[1].tolist()] == [2, 3, [1, 1]]
    # A variable in a tuple gets the new value in place.
    del state["pair.1"]
    net.load_state_dict(state, strict=False)
    assert [float(net.gain), float(net.pair[0]), net.pair[1].tolist()] == [9, 9, [1, 1]]


def test_calling_a_module_without_forward_is_an_error():
    with pytest.raises(NotImplementedError, match="Module has no forward"):
        nn.Module()(1)


@pytest.mark.parametrize("mode", [(2, 2), "no", 1, None], ids=repr)
def test_train_rejects_modes_other_than_true_and_false(mode: object) -> None:
    rank, alpha = 2, 2
    layer = tc.nn.LoRALinear(tc.ones(4, 4), rank, alpha)
    with pytest.raises(tc.ArgumentError, match=r"train: mode is .*, expected True"):
        layer.train(mode)
    assert layer(tc.ones(1, 4)).shape == (1, 4)
