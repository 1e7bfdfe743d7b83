"""What a run tells people while it starts, before there is a panel or a step."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger(__name__)


def tell(*lines: str) -> None:
    """Lines on the terminal and in the log."""
    for line in lines:
        log.info("%s", line)
        print(line, file=sys.stderr, flush=True)
