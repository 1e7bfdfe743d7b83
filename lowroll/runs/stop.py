"""The request to stop: SIGINT, SIGTERM and SIGHUP let a run finish its step and write a checkpoint.

first signal     the step ends as usual; one that still generates or scores after DROP_S is
                 dropped
second signal    has its usual, immediate effect (one that comes within a second is taken for
                 the first one: terminals, shells and wrappers often send two)
END_S later      the process ends without a checkpoint, if it still has not stopped
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
DROP_S = 20.0  # batch systems kill 30 s or more after they ask, and a checkpoint takes time too
END_S = 600.0
ECHO_S = 1.0
SPEAK_S = 10.0  # for a line of the log


class StepDropped(Exception):
    """A step that was not to be waited for. Nothing was learnt in it."""


class Stop:
    """The request to stop a run, true once it was made; `signal` is the number of the signal that
    made it, else 0."""

    def __init__(self) -> None:
        self.signal = 0
        self._droppable = False
        self._asked_at = 0.0
        self._over = threading.Event()
        self._speaker: threading.Thread | None = None

    def __bool__(self) -> bool:
        return bool(self.signal)

    def check(self) -> None:
        """Raise StepDropped when the step takes too long for a run that was asked to stop, and can
        be dropped."""
        if self.signal and self._droppable and time.monotonic() - self._asked_at > DROP_S:
            raise StepDropped

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Mark the block as one in which the step can still be dropped: nothing has been learnt in
        it."""
        self._droppable = True
        try:
            yield
        finally:
            self._droppable = False

    def ask(self, number: int) -> bool:
        """Take a signal; False for a second one that is meant."""
        if self.signal:
            return time.monotonic() - self._asked_at < ECHO_S
        self.signal = number
        self._asked_at = time.monotonic()
        # a thread may write, a handler may not
        self._speaker = threading.Thread(target=self._wait, name="stop", daemon=True)
        self._speaker.start()
        return True

    def close(self) -> None:
        """Wait until the log says who asked, once the run has stopped."""
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
    """Write to nowhere where nobody reads any more, a closed terminal or a pipe without a reader:
    what ends the reader often ends the run too, and a run that is asked to stop must get to its
    checkpoint."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


@contextmanager
def polite_stop() -> Iterator[Stop]:
    """Let the signals of SIGNALS ask to stop, in the block. One that is ignored (nohup) stays
    so."""
    stop = Stop()
    before: dict[int, Any] = {}

    def ask(number: int, _frame: FrameType | None) -> None:
        if not stop.ask(number):
            for caught, handler in before.items():
                signal.signal(caught, handler)
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():  # else signals are somebody else's
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, ask)
    try:
        yield stop
    finally:
        stop.close()
        for caught, handler in before.items():
            signal.signal(caught, handler)
