"""`backward`, `grad` and `gradcheck`: gradients, errors, saved memory and threads."""

import gc
import threading

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.testing import assert_close


def test_the_gradient_of_a_square_is_twice_the_value():
    x = tc.Var(2.0)
    (x * x).backward()
    assert x.grad.item() == 4


def test_gradients_accumulate_until_zero_grad():
    x = tc.Var([1.0, 2.0])
    for count in (1, 2, 3):
        (x * 3).sum().backward()
        assert x.grad.tolist() == [3 * count, 3 * count]
    x.zero_grad()
    assert x.grad is None
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_later_backward_passes_do_not_change_a_gradient_that_was_read():
    x = tc.Var([1.0])
    (x * 3).backward()
    first = x.grad
    (x * 3).backward()
    assert first.tolist() == [3]
    assert x.grad.tolist() == [6]


def test_a_gradient_of_the_variables_shape_and_dtype_can_be_assigned():
    x = tc.Var([1.0, 2.0])
    x.grad = tc.tensor([5.0, 6.0])
    assert x.grad.tolist() == [5, 6]
    x.grad = None
    assert x.grad is None
    with pytest.raises(tc.ShapeError, match="set_grad: the variable has shape"):
        x.grad = tc.ones(3)
    with pytest.raises(tc.DTypeError, match="set_grad: the variable is f32, the value f64"):
        x.grad = tc.ones(2, dtype="f64")


def test_gradients_pass_through_a_chain_of_operations():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 4)), rng.standard_normal((4, 2))
    va, vb = tc.Var(a), tc.Var(b)
    ((va @ vb).tanh() ** 2).mean().backward()
    tanh = np.tanh(a @ b)
    gradient_of_product = 2 * tanh * (1 - tanh**2) / tanh.size
    assert_close(va.grad, gradient_of_product @ b.T)
    assert_close(vb.grad, a.T @ gradient_of_product)


def test_gradients_of_broadcast_operands_have_the_shapes_of_the_operands():
    a, b = tc.Var(np.ones((3, 1))), tc.Var(np.ones(4))
    # All values are 1. Each a is used in 4 columns. Each b is used in 3 rows, twice in each.
    (a * b + b).sum().backward()
    assert a.grad.tolist() == [[4], [4], [4]]
    assert b.grad.tolist() == [6, 6, 6, 6]


def test_backward_of_several_numbers_needs_their_gradient():
    x = tc.Var([1.0, 2.0])
    (x * x).backward(tc.tensor([10.0, 100.0]))
    assert x.grad.tolist() == [20, 400]
    with pytest.raises(
        tc.ShapeError, match=r"backward: a tensor of shape \[2\] needs a gradient argument"
    ):
        (x * x).backward()
    with pytest.raises(
        tc.ShapeError, match=r"backward: the gradient has shape \[3\], the tensor \[2\]"
    ):
        (x * x).backward(tc.ones(3))


def test_a_graph_allows_one_backward_pass_unless_retained():
    x = tc.Var([3.0])
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.tolist() == [12]  # two passes, each with the gradient 2 * 3
    with pytest.raises(
        tc.AutogradError,
        match="already differentiated and its saved values are freed; pass retain_graph=True",
    ):
        y.backward()


def test_backward_without_a_variable_is_an_error():
    for t in (tc.ones(1), tc.Var([1.0]).detach() * 2):
        with pytest.raises(
            tc.AutogradError, match="backward: the tensor does not depend on a variable"
        ):
            t.backward()


def test_a_variable_changed_before_backward_is_an_error():
    x = tc.Var([1.0])
    y = x * x
    x.set(tc.tensor([2.0]))
    with pytest.raises(tc.AutogradError, match="changed in place"):
        y.backward()


def test_casts_are_differentiable():
    x = tc.Var([1.0, 2.0])
    (x.to("bf16") * 2).to("f64").sum().backward()
    assert x.grad.dtype == "f32"
    assert x.grad.tolist() == [2, 2]


def test_gradients_pass_through_joined_and_split_views():
    x = tc.Var(np.arange(6.0).reshape(2, 3))
    a, b = x.T.reshape(6).chunk(2)
    (tc.cat([a * 2, b * 3]) + tc.stack([x[0, 0], x[0, 0]]).sum()).sum().backward()
    expected = np.array([2, 2, 2, 3, 3, 3.0]).reshape(3, 2).T.copy()
    # Broadcasting adds 2 * x[0, 0] to each of the six elements.
    expected[0, 0] += 6 * 2
    assert_close(x.grad, expected)


def test_grad_returns_gradients_without_storing_them():
    x, w = tc.Var([1.0, 2.0]), tc.Var([3.0, 4.0])
    hidden = x * w
    loss = (hidden * hidden).sum()
    gx, gw, gh = tc.grad(loss, [x, w, hidden], retain_graph=True)
    assert gx.tolist() == [18, 64]
    assert gw.tolist() == [6, 32]
    assert gh.tolist() == [6, 16]
    assert x.grad is w.grad is None
    assert tc.grad(loss, x)[0].tolist() == [18, 64]


def test_grad_gives_none_for_an_unused_variable_and_rejects_a_constant():
    x, unused = tc.Var([1.0]), tc.Var([1.0])
    assert tc.grad(x * 2, [x, unused])[1] is None
    with pytest.raises(tc.AutogradError, match="grad: input 1 needs no gradient; make it a Var"):
        tc.grad(x * 2, [x, tc.ones(1)])


def test_results_without_a_derivative_need_no_gradient():
    x = tc.Var([1.0, 2.0])
    assert not (x > 1).requires_grad
    assert not x.argmax().requires_grad
    assert not x.detach().requires_grad


def test_deep_graphs_are_differentiated_and_freed_without_stack_overflow():
    x = tc.Var([1.0])
    y = x
    for _ in range(100_000):
        y = y + 1.0
    y.backward()
    assert x.grad.tolist() == [1]
    # Free a graph that no backward pass has freed.
    y = x
    for _ in range(100_000):
        y = y * 1.0
    del y


def test_saved_bytes_counts_what_the_tape_saves():
    gc.collect()
    before = tc.memory.saved_bytes()
    x = tc.Var(tc.ones(1000))
    y = (x * 2).exp()
    # exp saves its result, 1000 numbers in f32; x * 2 saves nothing.
    assert tc.memory.saved_bytes() == before + 4000
    y.sum().backward()
    assert tc.memory.saved_bytes() == before
    z = (x * 2).exp()
    assert tc.memory.saved_bytes() == before + 4000
    del z
    assert tc.memory.saved_bytes() == before


def test_each_thread_has_its_own_graph():
    results = {}

    def work(seed):
        rng = np.random.default_rng(seed)
        values = rng.standard_normal((64, 64))
        x = tc.Var(values)
        for _ in range(20):
            x.zero_grad()
            ((x @ x) * 0.5).sum().backward()
        # The gradient of x[i, j] is half of (the sum of row j + the sum of column i).
        results[seed] = np.allclose(
            x.grad.numpy(), 0.5 * (values.sum(1)[None, :] + values.sum(0)[:, None])
        )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


def test_gradcheck_accepts_correct_gradients():
    rng = np.random.default_rng(0)
    a, b = tc.tensor(rng.standard_normal((3, 4))), tc.tensor(rng.standard_normal((4, 2)))
    assert tc.gradcheck(lambda x, y: (x @ y).tanh(), [a, b])
    assert tc.gradcheck(lambda x: x.softmax(0), a)


def test_gradcheck_rejects_wrong_gradients():
    x = tc.tensor([0.5, 2.0, 1.0], dtype="f64")
    # The derivative is 3 t^2 + 1, but the detached factors make the gradient t^2. The error names
    # the entry where the two differ most: entry 1, where t is 2.
    with pytest.raises(
        tc.AutogradError, match=r"gradcheck: input 0, entry 1 of shape \[3\]: gradient"
    ):
        tc.gradcheck(lambda t: t.detach() * t.detach() * t + t.detach(), x)


def test_gradcheck_raises_for_wrong_arguments_and_failing_functions():
    x = tc.tensor([0.5, 2.0, 1.0], dtype="f64")
    with pytest.raises(
        tc.DTypeError, match="gradcheck: input 0 is f32; finite differences need f64"
    ):
        tc.gradcheck(lambda t: t, tc.ones(2))
    with pytest.raises(ZeroDivisionError):
        tc.gradcheck(lambda t: t * (1 / 0), x)
    with pytest.raises(tc.ArgumentError, match="gradcheck: the function returned float"):
        tc.gradcheck(lambda t: t.sum().item(), x)
    with pytest.raises(TypeError, match="expected a function, found int"):
        tc.gradcheck(3, x)
