"""Inside an `InterruptGuard`, the first signal requests a stop; a second has its usual effect."""

import os
import signal
import threading

import pytest

from trainable_candle.train.interrupt import InterruptGuard


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_requests_a_stop_and_restores_the_handler(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with InterruptGuard() as guard:
        assert guard.signal is None
        os.kill(os.getpid(), number)
        assert guard.signal is number
        assert signal.getsignal(number) == before
    assert "stopping after this step" in capfd.readouterr().err


def test_the_second_signal_has_its_usual_effect() -> None:
    with InterruptGuard() as guard:
        signal.raise_signal(signal.SIGINT)
        assert guard.signal is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_end_of_the_guard_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    with InterruptGuard():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_a_guard_in_another_thread_changes_no_handler() -> None:
    unchanged: list[bool] = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        with InterruptGuard():
            unchanged.append(signal.getsignal(signal.SIGINT) == before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert unchanged == [True]
