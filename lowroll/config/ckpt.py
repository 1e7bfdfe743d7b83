"""The section of checkpoints, and of what a run goes on from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lowroll.config.section import Count, Positive, Section


class CkptConfig(Section):
    """A checkpoint every `interval` steps; the newest `keep_last` stay (null: all), as does every
    `keep_interval`th."""

    interval: Count = 50  # steps between two
    keep_last: Count | None = 3  # the newest that stay; null: all
    keep_interval: Count | None = None  # every so many steps one stays for good
    # seconds that a full disk may last
    wait_for_space: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3600.0
    # go on from this step's checkpoint (-1: the newest); null: as --resume says
    resume_step: Annotated[int, Field(ge=-1)] | None = None
    # seconds that a resumed role waits for weights to draw from; null: as weight_broadcast.timeout
    wait_for_weights_timeout: Positive | None = None
    skip_progress: bool = False  # begin at step 1 with the weights of the checkpoint
    skip_buffer: bool = False  # leave the pools by difficulty of the checkpoint
