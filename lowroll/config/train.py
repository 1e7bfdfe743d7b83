"""The learner's sections: `train:`, `critic:`, `dapo:`, `stages:`, `guard:`, `ckpt:` and `sft:`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, Strict

from lowroll.config.document import Path
from lowroll.config.section import (
    Count,
    GroupSize,
    NotNegative,
    Positive,
    Probability,
    Problem,
    Rate,
    Schedule,
    Section,
    Share,
    Text,
    Whole,
    unique,
)

LORA_TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
Recomputed = bool | Annotated[float, Field(ge=0, le=1)] | None

# defaults of a large device
SIZES: dict[str, int] = {
    "tokens_per_microbatch": 8192,
    "activation_checkpointing": False,
    "logprob_chunk": 1024,
}


class TrainConfig(Section):
    """The learner."""

    max_steps: Count = 100  # steps of the run
    gpus: Count = 1  # ranks, each a process with a GPU
    # none: each of several ranks has the whole model; full: each a part; auto: full, unless an adapter
    # learns
    sharding: Literal["auto", "none", "full"] = "auto"
    minibatches: Count = 1  # optimiser updates a batch
    # packed tokens of a forward pass, which hold a prompt and its response; null: 8192, and fewer
    # on a CPU to save memory
    tokens_per_microbatch: Count | None = None
    learning_rate: Rate = 1e-5  # after the warm-up
    lr_scheduler_type: Schedule = "constant"  # course of the rate after the warm-up
    warmup_steps: Whole = 0  # steps in which the rate rises
    # final rate of linear and cosine, over learning_rate
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_decay: NotNegative = 0.01  # decoupled
    # of the moments
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        Strict(False),
    ] = (0.9, 0.999)
    eps: Positive = 1e-8  # added to the root of the second moment
    max_grad_norm: Positive = 1.0  # longer gradients are cut to this length
    # 8bit: moments in 8 bits; muon: for hidden matrices
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    # aligned: in the rollouts' low-bit arithmetic (QaRL); a format: in its arithmetic, whatever the
    # rollouts are in
    forward: Literal["dense", "aligned", "fp8", "nvfp4"] = "dense"
    # gradients through the linear layers; fp8: by products of e4m3 codes. Gradients of the weights
    # stay in the run's dtype
    backward: Literal["dense", "fp8"] = "dense"
    teacher: Text | None = None  # folder or hub id of the frozen model of loss.aipo.teacher_tau
    uaq_scale: Positive | None = None  # QuRL's update-aware scaling; the paper uses 1.5
    weight_metrics: bool = True  # weights/*, at the cost of a copy of what is learned
    # true: recompute whole layers; a number: the gate-up product of this share of them; null:
    # false, and true on a CPU if smaller micro-batches are not enough
    activation_checkpointing: Recomputed = None
    # tokens whose logits exist at a time; null: 1024, and 256 on a CPU to save memory
    logprob_chunk: Count | None = None
    # read a prompt once for all its responses; same results up to rounding. null: where it can be;
    # not with recurrent layers, windows, replay_kv, or float32 on CUDA
    share_prompts: bool | None = None
    # the learner attends to what a bounded cache held, and so scores the sparse policy itself
    replay_kv: bool = False
    lora: bool = False  # learn adapters on a frozen base
    lora_rank: Count = 16  # rank of the adapters
    lora_alpha: Positive = 32.0  # their scale, times the rank
    # matrices with adapters; all of q, k, v (gate, up) also mean a qkv_proj (gate_up_proj)
    lora_target_modules: Annotated[
        tuple[Text, ...], Strict(False), Field(min_length=1), AfterValidator(unique)
    ] = LORA_TARGETS

    _longest: int | None = None

    @property
    def longest(self) -> int:
        """Return the limit on the tokens of a prompt and its response. Automatic sizes do not
        change it, since a longer sample has its own pass."""
        return self._longest or self.together

    @property
    def together(self) -> int:
        return self.tokens_per_microbatch or SIZES["tokens_per_microbatch"]

    def keeping_longest(self, other: TrainConfig) -> Self:
        """Return a copy with another section's `longest`."""
        copy = self.model_copy()
        copy._longest = other.longest
        return copy

    def sized(self) -> Self:
        """Return a copy whose null sizes are those of a large device."""
        return self.model_copy(
            update={key: size for key, size in SIZES.items() if getattr(self, key) is None}
        )


class DapoConfig(Section):
    """DAPO's sampling and length rules, for any algorithm. Lengths in tokens."""

    dynamic_sampling: bool | None = None  # draw again groups whose rewards are all equal
    max_rounds: Count = 8  # rounds of generation a step for dynamic sampling
    # when no group differs in all rounds: the run ends, or continues
    no_signal: Literal["end", "go_on"] = "end"
    overlong_max: Count | None = None  # Lmax: at this length the penalty is -1
    overlong_cache: Count | None = None  # Lc: the penalty starts at Lmax - Lc


class CriticConfig(Section):
    """PPO's critic: it predicts the reward, learns in full at a constant rate, and stays in the
    checkpoints."""

    model: Text | None = None  # folder or hub id with the same tokenizer; null: the run's
    learning_rate: Rate = 1e-5  # of its optimiser
    weight_decay: NotNegative = 0.01  # of its optimiser
    max_grad_norm: Positive = 1.0  # longer gradients are cut to this length
    value_clip: Positive | None = 0.5  # how far a value may move in a step; null: no clip
    warmup_steps: Whole = 0  # first steps, in which only the critic learns
    gamma: Share = 1.0  # discount a token
    lam: Share = 1.0  # GAE: 1 trusts the rewards, 0 the values
    whiten: bool = True  # advantages of mean 0 and variance 1 over the batch


class GuardConfig(Section):
    """Alarms on the mismatch (null: off), and their action after `patience` steps in a row.

    Defaults: verl's guide wants an effective sample size above 0.3. QuRL (Fig. 3) saw the KL grow
    from 0.002 to 0.025, and single weights of 1e5 before a collapse. Growth misses a run that
    starts too far away, so `kl_above` lies between int8's 0.05 nats and nvfp4's 0.33
    (SmolLM2-135M, docs/results.md).
    """

    # a warning, tighter bounds, or wider rollouts
    action: Literal["warn", "tighten", "fallback"] = "warn"
    patience: Count = 3  # steps in a row with an alarm before the action
    ess_below: Probability | None = 0.3  # mismatch/ess
    # moving average of mismatch/kl_k3 over its first steps
    kl_growth: Annotated[float, Field(gt=1)] | None = 10.0
    kl_floor: Positive = 2e-3  # nats; growth below this level is no alarm
    # nats; the same average from the first step on; off with noise or a truncated sampler
    kl_above: Positive | None = 0.1
    rejected_above: Probability | None = 0.5  # correction/rejected_fraction, or of sequences
    ratio_above: Positive | None = 1e3  # mismatch/weight_max
    nonfinite: bool = True  # a mismatch or an update that is not finite


class CkptConfig(Section):
    """A checkpoint every `interval` steps."""

    interval: Count = 50  # steps between checkpoints
    keep_last: Count | None = 3  # the newest that stay; null: all
    keep_interval: Count | None = None  # one every so many steps is kept for good
    # seconds to wait for space on a full disk
    wait_for_space: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3600.0
    # resume from this step's checkpoint (-1: the newest); null: as --resume says
    resume_step: Annotated[int, Field(ge=-1)] | None = None
    # seconds that a resumed role waits for weights; null: as weight_broadcast.timeout
    wait_for_weights_timeout: Positive | None = None
    skip_progress: bool = False  # begin at step 1 with the checkpoint's weights
    skip_buffer: bool = False  # drop the checkpoint's pools by difficulty


class SftConfig(Section):
    """`lowroll sft`: supervised warm start. Other settings are `train`'s."""

    data: Text | None = None  # a JSONL of {"messages": [...]}; null: env demonstrations
    num_examples: Count = 4096  # demonstrations drawn from the environments
    steps: Count = 200  # optimiser updates
    batch_size: Count = 32  # examples a step
    learning_rate: Rate = 1e-4  # after the warm-up
    lr_scheduler_type: Schedule = "cosine"  # course of the rate after the warm-up
    warmup_steps: Whole = 0  # steps in which the rate rises
    # final rate of linear and cosine, over learning_rate
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0


# paths of a stage's keys in the run's settings
KEYS: dict[str, tuple[str, ...]] = {
    "max_tokens": ("rollout", "max_tokens"),
    "batch_size": ("batch_size",),
    "rollouts_per_example": ("rollouts_per_example",),
    "overlong_max": ("dapo", "overlong_max"),
    "overlong_cache": ("dapo", "overlong_cache"),
}


class StageConfig(Section):
    """A later stage, from `step` on. null: as in the stage before. The run's own keys are its first
    stage.

    DeepScaleR lengthens responses so, from 8k to 24k tokens.
    """

    step: Annotated[int, Field(ge=2)]  # the stage's first step; a run's first step is 1
    max_tokens: Count | None = None  # rollout.max_tokens
    batch_size: Count | None = None  # rollouts a step
    rollouts_per_example: GroupSize | None = None  # the group's size
    overlong_max: Count | None = None  # dapo.overlong_max
    overlong_cache: Count | None = None  # dapo.overlong_cache

    def changes(self) -> dict[str, dict[str, int]]:
        """Return the new values by section; "" is the top of the tree."""
        values_by_section: dict[str, dict[str, int]] = {}
        for name, path in KEYS.items():
            value = getattr(self, name)
            if value is not None:
                section = path[0] if len(path) == 2 else ""
                values_by_section.setdefault(section, {})[path[-1]] = value
        return values_by_section


def order_problems(stages: Sequence[StageConfig], overlong_max: int | None) -> Iterator[Problem]:
    """Yield stages out of order, and longer responses without a new soft length limit."""
    previous_step = 1
    for i, stage in enumerate(stages):
        stage_path: Path = ("stages", i)
        if stage.step <= previous_step:
            yield (
                ((*stage_path, "step"),),
                f"stages[{i}].step ({stage.step}) must come after step {previous_step}",
            )
        previous_step = max(previous_step, stage.step)
        if stage.max_tokens is not None and stage.overlong_max is None and overlong_max is not None:
            yield (
                ((*stage_path, "max_tokens"),),
                f"stages[{i}] changes max_tokens, so it needs overlong_max too (dapo.overlong_max is set)",
            )


def blame(index: int, problem: Problem) -> Problem:
    """Return a stage's problem with the stage's own keys first."""
    keys, message = problem
    stage_keys: list[Path] = [
        ("stages", index, name) for key in keys for name, path in KEYS.items() if path == key
    ]
    return (*stage_keys, *keys), f"from stages[{index}] on: {message}"
