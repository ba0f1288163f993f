"""Ctrl-C during a long backward pass."""

import os
import signal
import threading

import pytest

import trainable_candle as tc


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_keyboard_interrupt_ends_a_backward_pass():
    x = tc.Var([1.0])
    # Making the views is fast, but the backward pass of each view fills ten million elements.
    views = tc.stack([x.expand(10_000_000)[i] for i in range(3000)])
    runs, backward_started, backward_ended = [], threading.Event(), threading.Event()

    def last_step(t):
        runs.append(1)
        # The backward pass begins with a second run of this checkpointed function.
        if len(runs) == 2:
            backward_started.set()
        return t.exp().sum()

    def press_ctrl_c():
        backward_started.wait()
        # Give last_step time to return: the signal must interrupt the rest of the backward pass.
        if not backward_ended.wait(0.2):
            os.kill(os.getpid(), signal.SIGINT)

    loss = tc.checkpoint(last_step, views)
    thread = threading.Thread(target=press_ctrl_c)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    finally:
        backward_ended.set()
        backward_started.set()
        thread.join()
    # The backward pass did not reach the variable, and later operations work.
    assert x.grad is None
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2]
