"""Features with torch's names: generators, `requires_grad`, devices, gradient modes, aliases."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import trainable_candle as tc


def test_a_generator_is_independent_of_the_global_one() -> None:
    tc.manual_seed(3)
    expected = tc.randn(4).tolist(), tc.rand(4).tolist()
    tc.manual_seed(9)
    global_draw = tc.randn(2).tolist()
    tc.manual_seed(9)
    generator = tc.Generator().manual_seed(3)
    assert tc.randn(4, generator=generator).tolist() == expected[0]
    assert tc.randn(2).tolist() == global_draw
    state = generator.get_state()
    assert tc.rand(4, generator=generator).tolist() == expected[1]
    assert tc.rand(4, generator=generator.set_state(state)).tolist() == expected[1]
    assert generator.initial_seed() == 3
    with pytest.raises(TypeError, match=r"randn: generator is int, expected a tc\.Generator"):
        tc.randn(2, generator=3)


def test_a_generator_nested_in_itself_continues() -> None:
    expected = tc.randn(16, generator=tc.Generator().manual_seed(3)).tolist()
    tc.manual_seed(9)
    global_draw = tc.randn(2).tolist()
    tc.manual_seed(9)
    one, other = tc.Generator().manual_seed(3), tc.Generator().manual_seed(4)
    found = []
    # In its `with` block, a generator takes the place of the global one.
    with one:
        found += tc.randn(4).tolist()
        found += tc.randn(4, generator=one).tolist()
        with other, one:
            found += tc.randn(4).tolist()
            assert one.get_state() == tc.get_rng_state()
        found += tc.randn(4).tolist()
    assert found == expected
    assert other.get_state() == tc.Generator().manual_seed(4).get_state()
    assert tc.randn(2).tolist() == global_draw
    with one:
        one.manual_seed(3)
        assert tc.randn(16).tolist() == expected


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: tc.randperm(20, generator=g),
        lambda g: tc.normal(1.0, 2.0, (5,), generator=g),
        lambda g: tc.multinomial(tc.ones(9), 4, generator=g),
        lambda g: tc.multinomial(tc.ones(9), 4, replacement=True, generator=g),
        *(
            lambda g, name=name: getattr(tc.nn.init, name)(tc.Var(tc.zeros(4, 6)), generator=g)
            for name in tc.nn.init.__all__
            if name.startswith(("uniform", "normal", "trunc", "xavier", "kaiming", "orthogonal"))
        ),
    ],
)
def test_drawing_functions_take_a_generator(draw: Callable[[object], tc.Tensor]) -> None:
    state = tc.get_rng_state()
    generator = tc.Generator().manual_seed(5)
    first, second = draw(generator).tolist(), draw(generator).tolist()
    assert first != second
    assert draw(generator.manual_seed(5)).tolist() == first
    assert tc.get_rng_state() == state
    with pytest.raises(TypeError, match=r"generator is int, expected a tc\.Generator or None"):
        draw(3)


def test_tensors_made_with_requires_grad_are_variables() -> None:
    v = tc.tensor([1.0, 2.0], requires_grad=True)
    (v * v).sum().backward()
    assert v.grad is not None
    assert v.grad.tolist() == [2.0, 4.0]
    assert isinstance(tc.zeros(2, requires_grad=True), tc.Var)
    assert not isinstance(tc.zeros(2), tc.Var)
    assert tc.zeros(2).grad is None


def test_devices_equal_their_names() -> None:
    device = tc.device("cuda", 1)
    assert device == "cuda:1"
    assert (device.type, device.index) == ("cuda", 1)
    assert tc.device("cpu").index is None
    assert tc.device(0) == tc.device(type="cuda", index=0) == "cuda:0"
    assert (tc.ones(2).device.type, tc.ones(2).device.index) == ("cpu", None)
    assert isinstance(tc.Var(tc.ones(2)).device, tc.device)
    assert tc.ones(2, device=tc.device("cpu")).to(tc.device("cpu")).device == "cpu"
    with pytest.raises(tc.ArgumentError, match="device: found 'gpu', expected"):
        tc.device("gpu")


def test_modes_switch_recording_as_contexts_decorators_and_calls() -> None:
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


@pytest.mark.parametrize("mode", [tc.no_grad, tc.inference_mode, tc.no_grad()])
def test_a_mode_decorates_functions_and_generator_functions(mode: Any) -> None:
    @mode
    def evaluated(number: int) -> tuple[int, bool]:
        return number, tc.is_grad_enabled()

    @mode
    def steps() -> Iterator[Any]:
        try:
            sent = yield tc.is_grad_enabled()
            yield sent, tc.is_grad_enabled()
        except KeyError:
            yield "caught", tc.is_grad_enabled()
        finally:
            recorded_at_end.append(tc.is_grad_enabled())
        return "end"

    # Yields the values of `steps`, then the value that it returns.
    def around() -> Iterator[Any]:
        yield (yield from steps())

    recorded_at_end: list[bool] = []
    assert evaluated(3) == (3, False)
    assert evaluated.__name__ == "evaluated"
    running = around()
    assert next(running) is False
    assert tc.is_grad_enabled()
    assert running.send(4) == (4, False)
    with tc.no_grad():
        assert next(running) == "end"
        assert not tc.is_grad_enabled()
    running = steps()
    next(running)
    assert running.throw(KeyError()) == ("caught", False)
    running.close()
    assert recorded_at_end == [False, False]
    assert tc.is_grad_enabled()


def test_a_decorated_generator_function_records_in_its_own_mode() -> None:
    @tc.enable_grad
    def steps() -> Iterator[bool]:
        yield tc.is_grad_enabled()
        yield tc.is_grad_enabled()

    with tc.no_grad():
        for recording in steps():
            assert recording
            assert not tc.is_grad_enabled()


def test_arguments_may_have_the_names_of_torch_and_numpy() -> None:
    x = tc.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert x.sum(axis=0, keepdim=True).tolist() == [[4.0, 7.0]]
    assert x.var(dim=1, unbiased=False).tolist() == [0.25, 1.0]
    assert x.std(dim=1, unbiased=True).tolist() == pytest.approx([0.5**0.5, 2**0.5])
    assert x.argmax(axis=1).tolist() == [1, 1]
    with pytest.raises(tc.ArgumentError, match="sum: found both dim and axis, which mean the same"):
        x.sum(0, axis=0)
    with pytest.raises(TypeError, match="softmax: axis and dim are the same argument"):
        x.softmax(dim=0, axis=0)


@pytest.mark.parametrize(
    ("name", "words"),
    [("register_hook", r"use tc\.grad"), ("add_", "use add, or a tc.Var"), ("nothing", "nothing")],
)
def test_errors_of_missing_names_give_advice_or_quote_the_name(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(tc.ones(2), name)
