"""The section of a supervised warm start."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lowroll.config.section import Count, Rate, Schedule, Section, Text


class SftConfig(Section):
    """`lowroll sft`: supervised warm start. Everything that is not here (LoRA, decay, packing, ...)
    is `train`'s."""

    data: Text | None = None  # a JSONL of {"messages": [...]}; null: env demonstrations
    num_examples: Count = 4096  # demonstrations drawn from the environments
    steps: Count = 200  # optimiser updates
    batch_size: Count = 32  # examples a step
    learning_rate: Rate = 1e-4  # after the warm-up
    lr_scheduler_type: Schedule = "cosine"  # its course from then on
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # steps in which it rises
    # where linear and cosine end, over learning_rate
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
