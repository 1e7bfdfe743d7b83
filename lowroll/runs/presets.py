"""Sampling settings of papers' evaluations, by name, for `lowroll eval --preset`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowroll.types import nearest


@dataclass(frozen=True)
class Preset:
    """The sampling settings and sets of a paper. n: responses to an example; each: by set."""

    name: str
    sets: str
    source: str
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int | None = None  # None: as the run's
    n: int = 1
    each: Mapping[str, int] = field(default_factory=dict)
    chosen: str = ""  # our choices, which the source leaves open

    @property
    def settings(self) -> dict[str, object]:
        values: dict[str, object] = {
            "eval.temperature": self.temperature,
            "eval.top_p": self.top_p,
            "eval.rollouts_per_example": self.n,
            "rollout.max_tokens": self.max_tokens,
        }
        return {key: value for key, value in values.items() if value is not None}


PRESETS = {
    one.name: one
    for one in (
        Preset("greedy", "math7", "one greedy response each"),
        Preset(
            "qerl",
            "gsm8k,math500,aime24,aime25,amc23",
            "QeRL, section 4.1: pass@1 at temperature 0.6, top-p 0.95, 4096 tokens",
            temperature=0.6,
            top_p=0.95,
            max_tokens=4096,
            chosen="responses to an example",
        ),
        Preset(
            "qurl",
            "aime24,amc23,math500,minerva,olympiadbench",
            "QuRL, section 5.1 and Table 3 (DeepScaleR): avg@32",
            temperature=0.6,
            max_tokens=24576,
            n=32,
            chosen="temperature (that of its rollouts), top-p, length (its last stage's)",
        ),
        Preset(
            "qurl-dapo",
            "aime24",
            "QuRL, section 5.1 and Table 2: avg@32 at temperature 1 and top-p 0.7",
            temperature=1.0,
            top_p=0.7,
            max_tokens=3072,
            n=32,
            chosen="length (what the model's context of 4096 leaves)",
        ),
        Preset(
            "qurl-gsm8k",
            "gsm8k",
            "QuRL, section 5.1 and Table 1: greedy, 512 tokens",
            max_tokens=512,
        ),
        Preset(
            "sparse-rl",
            "math7",
            "Sparse-RL, section 5.1 and Table 1: avg@32 of AIME24 and AMC23, pass@1 of the others",
            temperature=1.0,
            max_tokens=4096,
            each={"aime24": 32, "amc23": 32},
            chosen="temperature, top-p and length (those of its rollouts)",
        ),
        Preset(
            "qarl",
            "aime24,aime25,amc23,math500,minerva,olympiadbench,ood",
            "QaRL, section 4 and appendix B: temperature 0.6, 16384 tokens",
            temperature=0.6,
            max_tokens=16384,
            each={"aime24": 32, "aime25": 32, "amc23": 32},
            chosen="top-p, responses to an example",
        ),
    )
}


def preset(name: str) -> Preset:
    """Return a preset by name. ValueError with the nearest known one."""
    if name in PRESETS:
        return PRESETS[name]
    hint = nearest(name, PRESETS, repr)
    raise ValueError(f"--preset: unknown {name!r}{hint}; known: {', '.join(PRESETS)}")
