"""A time limit on Python code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(seconds: float, error: type[BaseException], of_cpu: bool = False) -> Iterator[None]:
    """Raise `error` in the main thread after so many seconds, or each time that so many of CPU time
    have passed. A long operation of C code is not interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise error

    timer, number = signal.ITIMER_REAL, signal.SIGALRM
    if of_cpu:
        timer, number = signal.ITIMER_VIRTUAL, signal.SIGVTALRM
    previous_handler = signal.signal(number, stop)
    signal.setitimer(timer, seconds, seconds if of_cpu else 0)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, previous_handler)
