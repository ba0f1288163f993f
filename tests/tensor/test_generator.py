"""Generators, leaves, devices and modes of recording with torch's names."""

import pytest

import trainable_candle as tc


def test_a_generator_is_a_stream_of_its_own() -> None:
    tc.manual_seed(3)
    expected = tc.randn(4).tolist(), tc.rand(4).tolist()
    tc.manual_seed(9)
    after = tc.randn(2).tolist()
    tc.manual_seed(9)
    generator = tc.Generator().manual_seed(3)
    assert tc.randn(4, generator=generator).tolist() == expected[0]
    assert tc.randn(2).tolist() == after
    state = generator.get_state()
    assert tc.rand(4, generator=generator).tolist() == expected[1]
    assert tc.rand(4, generator=generator.set_state(state)).tolist() == expected[1]
    assert generator.initial_seed() == 3
    with pytest.raises(TypeError, match=r"randn: generator is int, expected a tc\.Generator"):
        tc.randn(2, generator=3)


def test_leaves_need_a_gradient() -> None:
    v = tc.tensor([1.0, 2.0], requires_grad=True)
    (v * v).sum().backward()
    assert v.grad is not None
    assert v.grad.tolist() == [2.0, 4.0]
    assert isinstance(tc.zeros(2, requires_grad=True), tc.Var)
    assert not isinstance(tc.zeros(2), tc.Var)
    assert tc.zeros(2).grad is None


def test_devices_are_their_names() -> None:
    device = tc.device("cuda", 1)
    assert device == "cuda:1"
    assert (device.type, device.index) == ("cuda", 1)
    assert tc.device("cpu").index is None
    assert tc.ones(2, device=tc.device("cpu")).to(tc.device("cpu")).device == "cpu"
    with pytest.raises(tc.ArgumentError, match="device: found 'gpu', expected"):
        tc.device("gpu")


def test_recording_is_switched() -> None:
    @tc.inference_mode()
    def evaluated() -> bool:
        return tc.is_grad_enabled()

    @tc.set_grad_enabled(False)
    def switched() -> bool:
        return tc.is_grad_enabled()

    assert not evaluated()
    assert not switched()
    assert tc.is_grad_enabled()
    with tc.set_grad_enabled(False):
        assert not tc.is_grad_enabled()
        with tc.set_grad_enabled(True):
            assert tc.is_grad_enabled()
        assert not tc.is_grad_enabled()
    with tc.inference_mode(False):
        assert tc.is_grad_enabled()
    with tc.no_grad():
        tc.set_grad_enabled(True)
        assert tc.is_grad_enabled()
    assert tc.is_grad_enabled()


def test_other_names_of_arguments() -> None:
    x = tc.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert x.sum(axis=0, keepdim=True).tolist() == [[4.0, 7.0]]
    assert x.var(dim=1, unbiased=False).tolist() == [0.25, 1.0]
    assert x.std(dim=1, unbiased=True).tolist() == pytest.approx([0.5**0.5, 2**0.5])
    assert x.argmax(axis=1).tolist() == [1, 1]
    with pytest.raises(tc.ArgumentError, match="sum: found dim and axis, which mean the same"):
        x.sum(0, axis=0)
    with pytest.raises(TypeError, match="softmax: axis and dim are the same argument"):
        x.softmax(dim=0, axis=0)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("register_hook", r"use tc\.grad"), ("add_", "use add, or a tc.Var"), ("nothing", "nothing")],
)
def test_what_is_not_there_says_what_is(name: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=advice):
        getattr(tc.ones(2), name)
