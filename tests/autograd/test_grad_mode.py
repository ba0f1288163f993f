"""Switching the recording of operations off and on."""

import threading

import pytest

import trainable_candle as tc


def test_contexts_switch_recording_off_and_on():
    x = tc.Var([1.0])
    with tc.no_grad():
        assert not tc.is_grad_enabled()
        assert not (x * 2).requires_grad
        with tc.enable_grad():
            assert (x * 2).requires_grad
        assert not (x * 2).requires_grad
    assert tc.is_grad_enabled()
    assert (x * 2).requires_grad


def test_a_decorated_function_records_nothing():
    x = tc.Var([1.0])

    # The function calls itself, so the contexts of the decorator are nested.
    @tc.no_grad()
    def double(t, depth=0):
        assert not tc.is_grad_enabled()
        return double(t, depth + 1) if depth < 3 else t * 2

    assert double.__name__ == "double"
    assert not double(x).requires_grad
    assert tc.is_grad_enabled()


def test_an_exception_restores_the_mode():
    with pytest.raises(KeyError), tc.no_grad():
        raise KeyError
    assert tc.is_grad_enabled()


def test_one_guard_may_be_nested_and_reused():
    guard = tc.no_grad()
    with guard, tc.enable_grad(), guard:
        assert not tc.is_grad_enabled()
    assert tc.is_grad_enabled()
    with guard:
        assert not tc.is_grad_enabled()
    assert tc.is_grad_enabled()


def test_each_thread_has_its_own_mode():
    seen = []
    with tc.no_grad():
        thread = threading.Thread(target=lambda: seen.append(tc.is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]  # a new thread records, whatever the mode of the thread that starts it


def test_without_recording_operations_save_no_bytes():
    before = tc.memory.saved_bytes()
    x = tc.Var(tc.ones(100))
    with tc.no_grad():
        y = (x * x).exp()
    assert tc.memory.saved_bytes() == before
    assert y.is_leaf
