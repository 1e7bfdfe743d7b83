"""`correction: auto`: the choice of a correction by the rollouts and the learner's forward, and
refused combinations.

The first row of `AUTO` that applies is taken. `COLLAPSES` are combinations that a paper saw fail;
they need `force: true`.

Each row names its paper. QaRL (Fig. 8) saw gspo drift with a learner in the rollouts' arithmetic.
QeRL trains LoRA on the rollouts' own low-bit base without a correction; tis is safe there.

A penalty and `min_tokens`, which bans stop ids until then, truncate a sampler like top_p. A second
format (`rollout.large_batch_weights`) counts as low-bit rollouts that no learner shares. A learner
that rounds beside dense rollouts (`train.forward: fp8`) is as far from them as a dense one from
rollouts in its format.

Another engine's kernels differ in bfloat16 by a few hundredths of a nat, and more for single
tokens, which ruined runs on vLLM's rollouts and which truncated weights correct (Yao et al., 2025,
docs/algorithms.md). A cache that rounds its keys makes a smaller gap.

Formats that round activations differ from a pretrained learner even with shared codes (LoRA) or an
aligned learner. A capped weight suits int8's gap; those of nvfp4, int4 and w4a8 are too wide for
any correction (docs/algorithms.md).

GSPO's ratio is a sequence's, so acr, reweight and sparse have no form under it; its corrected form
is tbpo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowroll.config.schema import RunSettings
from lowroll.quant.table import is_dense


@dataclass(frozen=True)
class Rollouts:
    """The properties of rollouts and learner that decide the correction."""

    weights: str  # two formats are "nvfp4+fp8"
    truncated: tuple[str, ...] = ()  # settings that truncate the sampler, such as "top_p 0.9"
    noisy: bool = False  # with noise that the learner does not share
    aligned: bool = False  # the learner multiplies in the rollouts' arithmetic
    rounds: bool = False  # the learner multiplies in another format than the rollouts
    lora: bool = False  # learner and rollouts share the base's codes
    kv_policy: str = "dense"
    kv_dtype: str | None = None  # None: the engine's own
    replayed: bool = False  # the learner attends only to keys in the rollouts' cache
    engine: str = "native"
    exact: bool = False  # the learner computes their log-probs bit for bit
    stale: str = ""  # the setting that makes them old

    @property
    def low_bit(self) -> bool:
        return not self.exact and not is_dense(self.weights)

    @property
    def forgets(self) -> bool:
        """Return whether the learner attends to evicted keys."""
        return self.kv_policy != "dense" and not self.replayed

    @property
    def low_bit_cache(self) -> bool:
        return self.kv_dtype is not None

    @property
    def foreign(self) -> bool:
        return self.engine != "native"

    @property
    def words(self) -> str:
        parts = [f"use {self.weights} weights"]
        parts += [f"come from {self.engine}"] if self.foreign else []
        parts += [f"are cut by {', '.join(self.truncated)}"] if self.truncated else []
        parts += ["carry noise"] if self.noisy else []
        parts += [f"may be of earlier weights ({self.stale})"] if self.stale else []
        is_bounded = self.kv_policy != "dense"
        replay_text = " and the learner replays" if self.replayed else ""
        parts += [f"have a cache that {self.kv_policy} bounds{replay_text}"] if is_bounded else []
        parts += [f"have an {self.kv_dtype} cache"] if self.low_bit_cache else []
        return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


@dataclass(frozen=True)
class CorrectionRow:
    """A row of the table. `gspo` is the correction under that algorithm, `sets` are values of the
    section `loss.<correction>`, and `example` is a configuration to which the row applies."""

    price: str
    forward: str
    correction: str
    gspo: str
    reason: str
    source: str
    applies: Callable[[Rollouts], bool]
    example: Mapping[str, Any]
    sets: Mapping[str, float] = field(default_factory=dict)


AUTO: tuple[CorrectionRow, ...] = (
    CorrectionRow(
        "a bounded cache (rollout.kv.policy)",
        "any",
        "sparse",
        "tbpo",
        "so they have lost keys that the learner sees: weights, capped because single ones reach "
        "hundreds, and a response that the learner finds impossible is rejected",
        "Sparse-RL sec. 4, docs/results.md",
        lambda r: r.forgets,
        {"rollout": {"weights": "dense", "kv": {"policy": "rkv"}}},
        {"veto": 1e-4, "xi_cap": 1.5},
    ),
    CorrectionRow(
        "truncated sampler (top_p, top_k, min_p, repetition_penalty, min_tokens)",
        "any",
        "reweight",
        "tbpo",
        "so tokens are missing from them: capped weights, and a response that the learner finds "
        "impossible is rejected",
        "Sparse-RL sec. 3",
        lambda r: bool(r.truncated),
        {"rollout": {"weights": "int8", "top_p": 0.9}},
        {"veto": 1e-4},
    ),
    CorrectionRow(
        "any format, with the learner's bits (rollout.exact)",
        "aligned",
        "none",
        "none",
        "and a learner of their version computes their log-probs with the same bits: there is nothing to correct",
        "",
        lambda r: r.exact and not r.noisy and not r.stale,
        {"rollout": {"weights": "int8_rotated", "exact": True}},
    ),
    CorrectionRow(
        "dense",
        "in a format (train.forward: fp8, nvfp4)",
        "acr",
        "tbpo",
        "and the learner's forward rounds where they do not: the mismatch of low-bit rollouts, with "
        "the sides exchanged",
        "QuRL Eq. 9",
        lambda r: r.rounds and not r.low_bit,
        {"rollout": {"weights": "dense"}, "train": {"forward": "fp8"}},
    ),
    CorrectionRow(
        "dense, an 8-bit cache (rollout.kv.dtype)",
        "any",
        "tis",
        "tis",
        "whose rounding a capped weight pays for",
        "QuRL Eq. 5",
        lambda r: r.low_bit_cache and not r.low_bit and not r.noisy,
        {"rollout": {"weights": "dense", "kv": {"dtype": "fp8"}}},
    ),
    CorrectionRow(
        "dense, of another engine (rollout.engine: vllm)",
        "any",
        "tis",
        "tis",
        "whose kernels round otherwise than the learner's: a capped weight pays for it",
        "Yao et al. 2025; verl; QuRL Eq. 5",
        lambda r: r.foreign and not r.low_bit,
        {"rollout": {"engine": "vllm", "weights": "dense"}},
    ),
    CorrectionRow(
        "dense or with the learner's bits, of earlier weights (asynchrony)",
        "any",
        "tis",
        "tis",
        "so they are of another policy: without weights, two of three runs four steps behind ended "
        "below their start",
        "QuRL Eq. 5, docs/results.md",
        lambda r: bool(r.stale) and not r.low_bit and not r.noisy,
        {
            "rollout": {"weights": "dense"},
            "launcher": "local",
            "asynchrony": {"max_async_level": 1},
        },
    ),
    CorrectionRow(
        "dense",
        "any",
        "none",
        "none",
        "which are the learner's own up to rounding",
        "",
        lambda r: not r.low_bit and not r.noisy,
        {"rollout": {"weights": "dense"}},
    ),
    CorrectionRow(
        "low-bit",
        "aligned",
        "tbpo",
        "tbpo",
        "and the learner's forward is aligned with them",
        "QaRL sec. 3.2",
        lambda r: r.low_bit and r.aligned,
        {"rollout": {"weights": "int4"}, "train": {"forward": "aligned"}},
    ),
    CorrectionRow(
        "noise on the norms that the learner does not share",
        "dense",
        "acr",
        "tbpo",
        "so the learner must pay for the mismatch",
        "QuRL Eq. 9",
        lambda r: r.noisy,
        {"rollout": {"weights": "dense"}, "noise": {}},
    ),
    CorrectionRow(
        "low-bit",
        "dense, LoRA on the same base",
        "tis",
        "tis",
        "and the learner shares their codes under its adapter: a capped weight pays for the "
        "arithmetic",
        "QuRL Eq. 5",
        lambda r: r.low_bit and r.lora,
        {"rollout": {"weights": "nvfp4"}, "train": {"lora": True}},
    ),
    CorrectionRow(
        "low-bit",
        "dense",
        "acr",
        "tbpo",
        "so the learner must pay for the mismatch",
        "QuRL Eq. 9",
        lambda r: r.low_bit,
        {"rollout": {"weights": "int8"}},
    ),
)


def choose_row(rollouts: Rollouts) -> CorrectionRow:
    """Return the first row that applies."""
    return next(row for row in AUTO if row.applies(rollouts))


def choose_correction(algorithm: str, rollouts: Rollouts) -> tuple[str, str]:
    """Return the chosen correction and the reason."""
    row = choose_row(rollouts)
    if algorithm == "gspo" and row.gspo != row.correction:
        return row.gspo, (
            f"the rollouts {rollouts.words}, {row.reason} ({row.correction} has no form under "
            f"gspo; {row.gspo} is gspo with a band where A < 0, QaRL sec. 3.2)"
        )
    return row.correction, f"the rollouts {rollouts.words}, {row.reason}" + (
        f" ({row.source})" if row.source else ""
    )


@dataclass(frozen=True)
class Collapse:
    """A correction that fails with a `rollout.kv`, or with a `rollout.weights` if the learner is
    neither aligned nor on their base (LoRA)."""

    correction: str
    price: str
    seen: str

    def applies(self, rollouts: Rollouts) -> bool:
        if self.price == "kv":
            return rollouts.forgets
        return rollouts.low_bit and not rollouts.aligned and not rollouts.lora


COLLAPSES: tuple[Collapse, ...] = (
    Collapse(
        "none",
        "kv",
        "Sparse-RL's Fig. 1: the reward falls and the gradient spikes after about 200 steps; its "
        "Table 1 ends at 45.1 with R-KV and 34.0 with SnapKV, where dense rollouts end at 53.1",
    ),
    Collapse(
        "none",
        "weights",
        "QuRL's Table 2 ends near 0 for INT8 and FP8, where BF16 has 31.67; so does Table 1 for "
        "FP8",
    ),
    Collapse(
        "is",
        "weights",
        "QuRL's Fig. 2: the reward collapses after a few steps, because the clip acts on the "
        "mismatch",
    ),
)


def known_collapse(correction: str, rollouts: Rollouts) -> Collapse | None:
    """Return the row against a combination, or None."""
    return next(
        (row for row in COLLAPSES if row.correction == correction and row.applies(rollouts)), None
    )


# settings that truncate the sampler, with their neutral values
_NOT_TRUNCATED = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}


def rollouts_of(cfg: RunSettings) -> Rollouts:
    """Return a run's rollouts, from its settings."""
    rollout = cfg.rollout
    truncated = [
        f"{name} {getattr(rollout, name)}"
        for name, neutral_value in _NOT_TRUNCATED.items()
        if getattr(rollout, name) != neutral_value
    ]
    has_second = rollout.large_batch_weights != rollout.weights
    second_format = rollout.large_batch_weights if has_second else None
    # A dense second format is LoRA's own base, which the learner shares.
    second_is_low_bit = second_format is not None and not is_dense(second_format)
    weights = f"{rollout.weights}+{second_format}" if second_is_low_bit else rollout.weights
    return Rollouts(
        weights,
        truncated=tuple(truncated),
        noisy=cfg.noise is not None and cfg.noise.learner == "clean",
        exact=bool(rollout.exact),
        aligned=cfg.forward in ("aligned", rollout.weights) and second_format is None,
        rounds=cfg.forward not in ("dense", "aligned", rollout.weights),
        lora=cfg.train.lora and not second_is_low_bit,
        kv_policy=rollout.cache.policy,
        kv_dtype=rollout.cache.kv_dtype,
        replayed=cfg.train.replay_kv,
        engine=rollout.engine,
        stale=_cause_of_staleness(cfg),
    )


def _cause_of_staleness(cfg: RunSettings) -> str:
    """Return the setting by which a group may wait for a later batch."""
    asynchrony = cfg.asynchrony
    if asynchrony.max_async_level:
        return f"asynchrony.max_async_level {asynchrony.max_async_level}, between processes"
    filters_groups = cfg.dapo.dynamic_sampling or cfg.buffer.online_difficulty_filtering
    has_surplus = asynchrony.oversampling_factor > 1 or filters_groups
    if asynchrony.partial != "none" and has_surplus:
        return f"asynchrony.partial {asynchrony.partial}"
    return ""


def correction_of(cfg: RunSettings) -> tuple[str, str]:
    """Return the run's correction, and the reason if `auto` chose it."""
    if cfg.correction != "auto":
        return cfg.correction, ""
    return choose_correction(cfg.algorithm, rollouts_of(cfg))


def thresholds_of(cfg: RunSettings) -> dict[str, float]:
    """Return the options that `auto` sets in the correction's section and the file does not."""
    row = choose_row(rollouts_of(cfg))
    if cfg.correction != "auto" or not row.sets or correction_of(cfg)[0] != row.correction:
        return {}
    set_options = getattr(cfg.loss, row.correction).model_fields_set
    return {name: value for name, value in row.sets.items() if name not in set_options}
