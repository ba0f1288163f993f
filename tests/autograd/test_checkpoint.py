"""`tc.checkpoint`: recomputation of Python functions in the backward pass."""

import functools

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.nn import functional as F
from trainable_candle.testing import assert_close

POLICIES = ["full", "selective", "none"]


def block(x, w):
    return ((x @ w).gelu() @ w).softmax(-1)


@pytest.mark.parametrize("policy", POLICIES)
def test_results_and_gradients_equal_those_without_a_checkpoint(policy):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((4, 8)), rng.standard_normal((8, 8))
    found = []
    for layer in (block, lambda x, w: tc.checkpoint(block, x, w, policy=policy)):
        x, w = tc.Var(a), tc.Var(b)
        y = layer(layer(x, w), w)
        (y * y).sum().backward()
        found.append((y, x.grad, w.grad))
    for plain, checkpointed in zip(*found, strict=True):
        np.testing.assert_array_equal(plain.numpy(), checkpointed.numpy())


@pytest.mark.parametrize("policy", POLICIES)
def test_captured_variables_get_gradients_from_several_results(policy):
    x, captured = tc.Var([1.0, 2.0]), tc.Var([3.0, 4.0])

    def both(t):
        return t * captured, (t + captured).exp()

    product, power = tc.checkpoint(both, x, policy=policy)
    (product.sum() + power.sum()).backward()
    gradient_of_power = np.exp([4.0, 6.0])
    assert_close(x.grad, np.array([3, 4]) + gradient_of_power)
    assert_close(captured.grad, np.array([1, 2]) + gradient_of_power)


def test_lists_and_tuples_of_results_are_returned_as_tuples():
    x = tc.Var([1.0])
    assert isinstance(tc.checkpoint(lambda t: [t * 2, t * 3], x), tuple)
    assert isinstance(tc.checkpoint(lambda t: (t * 2,), x), tuple)
    assert isinstance(tc.checkpoint(lambda t: t * 2, x), tc.Tensor)


def test_checkpoints_save_fewer_bytes():
    x = tc.Var(tc.ones(256, 256))

    def deep(t):
        for _ in range(8):
            t = t.tanh().sin()
        return t

    before = tc.memory.saved_bytes()
    y = deep(x)
    plain_bytes = tc.memory.saved_bytes() - before
    del y
    y = tc.checkpoint(deep, x)
    checkpoint_bytes = tc.memory.saved_bytes() - before
    # Without a checkpoint, at least the eight results of `tanh` are saved; with it, only the input.
    assert checkpoint_bytes <= plain_bytes / 8
    y.sum().backward()
    assert tc.memory.saved_bytes() == before


def test_backward_runs_the_function_again_up_to_the_last_needed_value():
    calls = []

    def step(t):
        calls.append("start")
        t = t.exp()
        calls.append("exp")
        t = t * 2.0
        calls.append("end")
        return t

    x = tc.Var([1.0])
    y = tc.checkpoint(step, x)
    assert calls == ["start", "exp", "end"]
    y.backward()
    # Of the values in `step`, the backward pass needs only the result of `exp`. So an exception
    # ends the second run within the call of `t.exp()`, before "exp" is appended.
    assert calls == ["start", "exp", "end", "start"]
    assert_close(x.grad, [2 * np.e])


def test_except_exception_does_not_catch_the_end_of_the_second_run():
    def careful(t):
        try:
            t = t.exp()
        except Exception as error:
            raise AssertionError("caught the exception that ends the second run") from error
        return t * 2.0

    x = tc.Var([1.0])
    tc.checkpoint(careful, x).backward()
    assert_close(x.grad, [2 * np.e])


def test_functions_may_catch_the_end_of_the_second_run():
    events = []

    def careless(t):
        try:
            t = t.exp()
        except BaseException as error:
            events.append(type(error).__name__)
            raise ValueError("swallowed") from error
        finally:
            events.append("finally")
        return t * 2.0

    x = tc.Var([1.0])
    tc.checkpoint(careless, x).backward()
    assert_close(x.grad, [2 * np.e])
    # The first run reaches only `finally`; ReplayComplete ends the second run.
    assert events == ["finally", "ReplayComplete", "finally"]


def test_the_second_run_draws_the_same_dropout_mask():
    tc.manual_seed(0)
    x = tc.Var(tc.ones(1000))
    # The backward passes of `exp` and `log` need values that only a second run can compute.
    y = tc.checkpoint(lambda t: F.dropout(t, 0.5).exp().log(), x)
    tc.randn(10)  # The second run must draw the mask again, not the numbers after these.
    state = tc.get_rng_state()
    y.sum().backward()
    assert tc.get_rng_state() == state
    # The inputs are 1, so the result and the gradient are both the scaled mask.
    assert_close(x.grad, y.detach().numpy())


def test_nested_checkpoints_do_not_change_the_gradient():
    x = tc.Var([0.3, 0.7])
    inner = functools.partial(tc.checkpoint, lambda t: t.exp().sin())
    y = tc.checkpoint(lambda t: inner(inner(t)).tanh(), x)
    y.sum().backward()
    without = tc.Var(x)
    without.exp().sin().exp().sin().tanh().sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), without.grad.numpy())


def test_under_no_grad_the_result_needs_no_gradient():
    with tc.no_grad():
        y = tc.checkpoint(lambda t: t.exp(), tc.Var([0.0]))
    assert y.tolist() == [1]
    assert not y.requires_grad


class UsersError(Exception):
    """An exception class of the caller."""


def test_exceptions_of_the_function_reach_the_caller():
    def fail(_):
        raise UsersError("first run", 42)

    with pytest.raises(UsersError) as caught:
        tc.checkpoint(fail, tc.Var([1.0]))
    assert caught.value.args == ("first run", 42)
    assert any(entry.name == "fail" for entry in caught.traceback)
    assert tc.is_grad_enabled()


def test_exceptions_of_the_second_run_reach_the_caller():
    runs = []

    def fail(t):
        runs.append(1)
        if len(runs) == 2:
            raise UsersError("second run")
        return t.exp()

    x = tc.Var([1.0])
    with pytest.raises(UsersError, match="second run"):
        tc.checkpoint(fail, x).backward()
    # The failed backward pass leaves no state behind.
    x.zero_grad()
    (x * x).backward()
    assert x.grad.tolist() == [2]


def test_a_keyboard_interrupt_reaches_the_caller():
    def fail(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tc.checkpoint(fail, tc.Var([1.0]))


def test_errors_of_operations_reach_the_caller():
    with pytest.raises(tc.ShapeError, match="reshape"):
        tc.checkpoint(lambda t: t.reshape(7), tc.Var([1.0]))


def test_a_second_run_that_computes_something_else_is_an_error():
    runs = []

    def fickle(t):
        runs.append(1)
        return t.exp().exp() if len(runs) == 1 else t

    with pytest.raises(tc.AutogradError, match="checkpoint: the function computed something else"):
        tc.checkpoint(fickle, tc.Var([1.0])).backward()


def test_a_captured_variable_that_changed_is_an_error():
    x, w = tc.Var([1.0]), tc.Var([2.0])
    y = tc.checkpoint(lambda t: (t * w).exp(), x)
    w.set(tc.tensor([3.0]))
    with pytest.raises(tc.AutogradError, match="changed in place"):
        y.backward()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda x: tc.checkpoint(lambda t, _: t, x, 3),
            tc.ArgumentError,
            "checkpoint: argument 1 is int, expected a Tensor; capture other values",
        ),
        (
            lambda x: tc.checkpoint(lambda _: 3, x),
            tc.ArgumentError,
            "checkpoint: the function returned int, expected a Tensor or a tuple of Tensors",
        ),
        (
            lambda x: tc.checkpoint(lambda t: (t, 1), x),
            tc.ArgumentError,
            "the function returned tuple",
        ),
        (
            lambda x: tc.checkpoint(lambda t: t, x, policy="some"),
            tc.ArgumentError,
            'checkpoint: unknown policy "some"; expected "none", "full", "selective" or "offload"',
        ),
        (lambda x: tc.checkpoint(3, x), TypeError, "expected a function, found int"),
    ],
    ids=["int argument", "int result", "int in results", "unknown policy", "no function"],
)
def test_wrong_arguments_are_errors(call, error, text):
    with pytest.raises(error, match=text):
        call(tc.Var([1.0]))
