"""The sizes of a learner's passes that the settings leave open, chosen by the memory plan on a CPU.

    tokens_per_microbatch       8192, 4096, ...: not below the longest sample, nor below LEAST
    logprob_chunk               1024, 256
    activation_checkpointing    false, true

The first that fits is taken: shorter chunks first, then smaller micro-batches, and recomputing
last, because only it costs time.

The bound is CPU_BYTES, or slightly more than the smallest passes need. Free memory counts only if
nothing else fits, so that a resumed run chooses the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from lowroll.config import RunConfig
from lowroll.config.train import SIZES, TrainConfig
from lowroll.model.transformer import Transformer
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.memory.plan import MemoryPlan, Planner, plan_sft, shown

CPU_BYTES = 4_000_000_000  # resident, of a run on a CPU
PROCESS = 500_000_000  # bytes of the interpreter and libraries
SLACK = 1.25  # resident bytes over torch's: its allocator cannot reuse all
LEAST = 512  # tokens of a micro-batch: fewer take longer
SMALL_CHUNK = 256


def chosen(planner: Planner, cfg: RunConfig) -> RunConfig:
    """Return the settings with all sizes chosen, and a note."""
    longest = max((work.prompt + work.response for work in planner.workloads), default=1)
    return _choose_sizes(cfg, planner.compute, longest, planner.plan)


def chosen_for_sft(
    cfg: RunConfig, compute: Compute, model: Transformer, longest: int, together: int
) -> RunConfig:
    """Return the same for `lowroll sft`. longest: tokens of a sample; together: of a batch."""
    return _choose_sizes(cfg, compute, longest, lambda now: plan_sft(now, compute, model, together))


def _choose_sizes(
    cfg: RunConfig, compute: Compute, longest: int, plan: Callable[[RunConfig], MemoryPlan]
) -> RunConfig:
    default_cfg = cfg.sized()
    candidates = [default_cfg.train]
    if compute.device.type == "cpu":
        candidates = list(ladder(cfg.train, longest))
    chosen_train = choose(candidates, lambda train: plan(cfg.model_copy(update={"train": train})))
    # A smaller micro-batch must not shorten the longest allowed sequence.
    sized_cfg = cfg.model_copy(update={"train": chosen_train.keeping_longest(default_cfg.train)})
    changed_sizes = [
        f"train.{key}: {str(getattr(chosen_train, key)).lower()}"
        for key in SIZES
        if getattr(chosen_train, key) != getattr(default_cfg.train, key)
    ]
    if not changed_sizes:
        return sized_cfg
    bytes_before = resident(plan(default_cfg))
    bytes_after = resident(plan(sized_cfg))
    return sized_cfg.with_notes(
        f"{', '.join(changed_sizes)}: chosen for a CPU, where the run then takes about {shown(bytes_after)} "
        f"instead of {shown(bytes_before)}; what the settings say stays as it is"
    )


def choose(steps: Sequence[TrainConfig], plan: Callable[[TrainConfig], MemoryPlan]) -> TrainConfig:
    """Return the first step that fits, from the largest to the smallest, or the last."""
    bound = max(CPU_BYTES, round(SLACK * resident(plan(steps[-1]))))
    plans = ((train, plan(train)) for train in steps)
    fitting = (train for train, now in plans if resident(now) <= bound and not now.missing)
    return next(fitting, steps[-1])


def ladder(train: TrainConfig, longest: int) -> Iterator[TrainConfig]:
    """Yield the settings from no change to the least memory. The user's sizes stay."""
    defaults = train.sized()
    token_counts = [defaults.together]
    if train.tokens_per_microbatch is None:
        while token_counts[-1] // 2 >= max(longest, LEAST):
            token_counts.append(token_counts[-1] // 2)
    chunks = [defaults.logprob_chunk]
    if train.logprob_chunk is None:
        chunks.append(SMALL_CHUNK)
    checkpointings = [defaults.activation_checkpointing]
    if train.activation_checkpointing is None:
        checkpointings.append(True)
    # `product` varies its last list first, so recomputing comes last.
    for checkpointing, tokens, chunk in product(checkpointings, token_counts, chunks):
        sizes = {
            "activation_checkpointing": checkpointing,
            "tokens_per_microbatch": tokens,
            "logprob_chunk": chunk,
        }
        yield defaults.model_copy(update=sizes)


def resident(plan: MemoryPlan) -> int:
    """Return the expected peak of resident bytes."""
    return PROCESS + round(SLACK * plan.peak)
