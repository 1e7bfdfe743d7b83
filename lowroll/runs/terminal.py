"""What a run tells people while it starts, before there is a panel or a step."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger(__name__)


def tell(text: str) -> None:
    """A line on the terminal and in the log."""
    log.info("%s", text)
    print(text, file=sys.stderr, flush=True)
