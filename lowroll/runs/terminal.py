"""The messages of a run while it starts, before there is a panel or a step."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger(__name__)


def tell(*lines: str) -> None:
    """Write lines to the terminal and to the log."""
    for line in lines:
        log.info("%s", line)
        print(line, file=sys.stderr, flush=True)
