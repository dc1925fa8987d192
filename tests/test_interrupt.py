"""Ctrl-C, held back until it is convenient."""

from __future__ import annotations

import signal
import threading

import pytest

from pagedinfer.interrupt import deferred_interrupts


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_is_raised_where_it_is_asked_for() -> None:
    reached = []

    def work() -> None:
        with deferred_interrupts() as check:
            check()
            ctrl_c()
            reached.append("after Ctrl-C")
            check()
            reached.append("after the check")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["after Ctrl-C"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_nobody_asked_for_is_raised_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        ctrl_c()


def test_the_second_is_raised_at_once() -> None:
    reached = []

    def work() -> None:
        with deferred_interrupts():
            ctrl_c()
            reached.append("after the first")
            ctrl_c()
            reached.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_error_is_not_hidden() -> None:
    def work() -> None:
        with deferred_interrupts():
            ctrl_c()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        work()


def test_a_handler_of_the_application_stays() -> None:
    calls = []

    def mine(*args: object) -> None:
        calls.append(args)

    signal.signal(signal.SIGINT, mine)
    try:
        with deferred_interrupts() as check:
            ctrl_c()
            check()
        assert len(calls) == 1
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_are_left_alone() -> None:
    entered = []

    def work() -> None:
        with deferred_interrupts() as check:
            entered.append(signal.getsignal(signal.SIGINT))
            check()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [signal.default_int_handler]
