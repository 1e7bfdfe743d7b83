"""The request to stop: SIGINT, SIGTERM and SIGHUP let a run finish its step and write a checkpoint.

first signal     the step ends as usual; one that still generates or scores after DROP_S is
                 dropped
second signal    its usual effect; within ECHO_S it is ignored, as shells often send two
END_S later      the process ends without a checkpoint
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DROP_S = 20.0  # batch systems kill after 30 s or more, and a checkpoint takes time too
END_S = 600.0
ECHO_S = 1.0
SPEAK_S = 10.0  # for a log line


class StepDropped(Exception):
    """A dropped step, from which nothing was learned."""


class Stop:
    """The request to stop a run, true once it was made. signal: 0 before."""

    def __init__(self) -> None:
        self.signal = 0
        self._droppable = False
        self._asked_at = 0.0
        self._over = threading.Event()
        self._speaker: threading.Thread | None = None

    def __bool__(self) -> bool:
        return bool(self.signal)

    def check(self) -> None:
        """Raise StepDropped when a stopping run's step takes too long."""
        if self.signal and self._droppable and time.monotonic() - self._asked_at > DROP_S:
            raise StepDropped

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Mark the block as droppable: nothing is learned in it."""
        self._droppable = True
        try:
            yield
        finally:
            self._droppable = False

    def ask(self, number: int) -> bool:
        """Handle a signal; return False for an intended second one."""
        if self.signal:
            return time.monotonic() - self._asked_at < ECHO_S
        self.signal = number
        self._asked_at = time.monotonic()
        # a thread may write, a signal handler may not
        self._speaker = threading.Thread(target=self._wait, name="stop", daemon=True)
        self._speaker.start()
        return True

    def close(self) -> None:
        """Wait until the log names the signal."""
        self._over.set()
        if self._speaker is not None:
            self._speaker.join(SPEAK_S)

    def _wait(self) -> None:
        name = signal.Signals(self.signal).name
        log.warning(
            "%s: finishing this step, then stopping. A step that still generates in %.0f s is "
            "dropped, to be made again by --resume. Signal again to stop at once; in %.0f s that "
            "happens by itself",
            name,
            DROP_S,
            END_S,
        )
        if self._over.wait(END_S):
            return
        log.error(
            "%s: not stopped after %.0f s; ending without a checkpoint of this step: --resume goes "
            "on from the "
            "newest one",
            name,
            END_S,
        )
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # a live view has hidden the cursor
        os._exit(128 + self.signal)


def leave_lost_outputs() -> None:
    """Redirect a closed terminal or broken pipe to nowhere, so that the run still reaches its
    checkpoint."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            null_descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_descriptor, descriptor)
            os.close(null_descriptor)


@contextmanager
def polite_stop() -> Iterator[Stop]:
    """Let SIGNALS request a stop in the block. An ignored signal (nohup) stays ignored."""
    stop = Stop()
    previous_handlers: dict[int, Any] = {}

    def restore_handlers() -> None:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)

    def ask(number: int, _frame: FrameType | None) -> None:
        if not stop.ask(number):  # a second signal has its usual effect
            restore_handlers()
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():  # other threads cannot handle signals
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                previous_handlers[number] = signal.signal(number, ask)
    try:
        yield stop
    finally:
        stop.close()
        restore_handlers()
