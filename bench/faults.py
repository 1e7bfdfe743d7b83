"""Faults of a set-up, injected into a run, and what lowroll says of them: `python -m bench.faults`.

A run of one step is made with each fault, and with none in several formats. What counts is what is said
in the first step: warnings of `runs.setup_faults` and `trainer.guard`, or the error of `runs.rollouts` that
ends the run after the first update. A fault is named when its own word stands in one of them. Runs learn
with AdamW at 1e-5 (LoRA: 1e-4).

    python -m bench.faults [--model smollm2] [--only FAULT ...] [--change JSON] [--out FOLDER]

writes `faults.json`; `docs/tables.py` makes a table of it. Reports of such faults with other frameworks
stand beside them, with their numbers at GitHub.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.harness import RESULTS, SomeOf, here, merged, parser_of, print_table, say
from lowroll import run
from lowroll.engine.base import Engine
from lowroll.engine.native import NativeEngine
from lowroll.model.families.base import Rope
from lowroll.model.folder import resolve
from lowroll.model.rope import inverse_frequencies
from lowroll.runs.assembly import engines
from lowroll.runs.rollouts import RolloutEngine
from lowroll.types import Group, Request, RunFailed

SETTINGS: dict[str, Any] = {
    "env": [{"id": "records"}],
    "batch_size": 24,
    "rollouts_per_example": 8,
    "rollout": {
        "weights": "dense",
        "max_tokens": 48,
        "max_batch": 24,
        "cache_tokens": 8192,
    },
    "train": {
        "max_steps": 1,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
    },
    "dtype": "float32",
    "device": "cpu",
    "score": {"workers": 1},
    "ckpt": {"interval": 10_000, "keep_last": 1},
}
LORA = {"lora": True, "lora_rank": 16, "learning_rate": 1e-4}
BF16 = {"rollout": {"weights": "bf16"}}
INT8 = {"rollout": {"weights": "int8"}}
NVFP4_LORA = {"rollout": {"weights": "nvfp4"}, "train": LORA}
TOP_P = 0.8
COLD = 0.7
SPOKEN = ("first batch", "guard", "update to version")  # where lines that count begin


@dataclass(frozen=True)
class Fault:
    """A fault. named: a word of the sentence that names it; None: there is no fault. change: the run's
    own settings. inject: the context in which the run is made, of a copy of the model's folder."""

    what: str
    named: str | None
    inject: Callable[[Path], AbstractContextManager[object]] = lambda folder: nullcontext()
    change: dict[str, Any] = field(default_factory=dict)
    reported: str = ""  # such faults with other frameworks


# -- engines that are not what they seem -----------------------------------------------------------


def deaf(folder: Path) -> AbstractContextManager[object]:
    """Let engines take every update without reading it."""

    def ignore(engine: NativeEngine, update: Any, in_flight: str = "keep") -> Any:
        engine.behavior = replace(engine.behavior, policy=engine._policy(update.version))
        engine.scheduler.set_behavior(engine.behavior)
        return engine.behavior

    return patch.object(NativeEngine, "update_weights", ignore)


@contextmanager
def built(change: Callable[[NativeEngine], object], folder: Path) -> Iterator[None]:
    """Change every engine when it has been made."""
    make = engines.make

    def changed(*args: Any, **settings: Any) -> Engine:
        engine = make(*args, **settings)
        assert isinstance(engine, NativeEngine)
        change(engine)
        return engine

    with patch.object(engines, "make", changed):
        yield


def rotate_at(theta: float, engine: NativeEngine) -> None:
    ropes: tuple[Rope, ...] = tuple(replace(rope, theta=theta) for rope in engine.spec.ropes)
    engine.model.freqs = inverse_frequencies(replace(engine.spec, ropes=ropes))


def in_half(folder: Path) -> AbstractContextManager[object]:
    make = engines.make

    def halved(cfg: Any, compute: Any, *rest: Any, **settings: Any) -> Engine:
        return make(cfg, replace(compute, dtype=torch.bfloat16), *rest, **settings)

    return patch.object(engines, "make", halved)


@contextmanager
def drawn(
    change: Callable[[Request], Request], recorded_at: float | None, folder: Path
) -> Iterator[None]:
    """Change all requests. recorded_at: the temperature of the log-probs that are returned, of the
    whole distribution; None: those of the changed requests."""
    generate = RolloutEngine.generate

    def changed(
        rollouts: RolloutEngine, requests: list[Request], on_progress: Any = None
    ) -> list[Group]:
        groups = generate(rollouts, [change(request) for request in requests], on_progress)
        return [
            _recorded(rollouts.engine, group, request, recorded_at)
            for group, request in zip(groups, requests, strict=True)
        ]

    with patch.object(RolloutEngine, "generate", changed):
        yield


def _recorded(engine: Engine, group: Group, request: Request, at: float | None) -> Group:
    """Return a group as that of another request, with the log-probs of a temperature."""
    rollouts = list(group.rollouts)
    if at is not None:
        ids = request.prompt_ids
        sequences = [ids + rollout.token_ids for rollout in rollouts]
        scores = engine.score(sequences, [len(ids)] * len(sequences), at)
        rollouts = [
            replace(rollout, logprobs=score.tolist())
            for rollout, score in zip(rollouts, scores, strict=True)
        ]
    return replace(group, request=request, rollouts=rollouts)


# -- folders that are not what they seem -----------------------------------------------------------


@contextmanager
def other_tokens(folder: Path) -> Iterator[None]:
    """Give the folder a tokenizer whose ordinary tokens have each other's ids."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    ordinary = [token for token, number in vocabulary.items() if number not in special]
    numbers = [vocabulary[token] for token in ordinary]
    vocabulary |= dict(zip(ordinary, reversed(numbers), strict=True))
    path.write_text(json.dumps(tokenizer))
    yield


@contextmanager
def other_template(folder: Path) -> Iterator[None]:
    """Give the folder the marks of Llama 3's chats."""
    turn = "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
    end = (
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(
        f"{{% for m in messages %}}{turn}{{% endfor %}}{end}"
    )
    yield


FAULTS: dict[str, Fault] = {
    "none, float32": Fault("float32 rollouts, no fault", None),
    "none, bf16": Fault("bfloat16 rollouts, no fault", None, change=BF16),
    "none, int8": Fault("INT8 rollouts, no fault", None, change=INT8),
    "none, nvfp4 lora": Fault("NVFP4 rollouts, LoRA, no fault", None, change=NVFP4_LORA),
    "none, top_p": Fault("top_p in the run's settings", None, change={"rollout": {"top_p": TOP_P}}),
    "stale weights": Fault(
        "new weights never reach the engine", "older weights", deaf, reported="TRL#5312"
    ),
    "stale codes": Fault("new weights never reach an INT8 engine", "older weights", deaf, INT8),
    "stale adapter": Fault(
        "a new adapter never reaches the engine",
        "older weights",
        deaf,
        {"train": LORA},
        "verl#7495: nothing was said; a mismatch that grew looked like staleness for two months",
    ),
    "tokenizer": Fault("the tokenizer of another model", "tokenizer", other_tokens),
    "template": Fault("the chat template of another model", "chat template", other_template),
    "rotary base": Fault(
        "the engine has a rotary base of 1e4, the model 1e5",
        "rotary base is 10000",
        partial(built, partial(rotate_at, 1e4)),
        reported="prime-rl#2802: KL of 0.03 from the first step on, found by hand; NeMo-RL#2981",
    ),
    "rotary base, int8": Fault(
        "the same of an INT8 engine",
        "rotary base is 10000",
        partial(built, partial(rotate_at, 1e4)),
        INT8,
    ),
    "half precision": Fault(
        "the engine computes in bfloat16, the learner in float32", "half precision", in_half
    ),
    "top_p, renormalized": Fault(
        f"a hidden top_p of {TOP_P}, log-probs of what it leaves",
        "were cut",
        partial(drawn, partial(replace, top_p=TOP_P), None),
        reported="NeMo-RL#3497, ART#140: defaults of generation_config.json, taken silently",
    ),
    "top_p, raw": Fault(
        f"a hidden top_p of {TOP_P}, log-probs of the whole distribution",
        "narrower",
        partial(drawn, partial(replace, top_p=TOP_P), 1.0),
        reported="NeMo-RL#3497, ART#140",
    ),
    "temperature, raw": Fault(
        f"drawn at temperature {COLD}, log-probs at 1",
        "narrower",
        partial(drawn, partial(replace, temperature=COLD), 1.0),
    ),
    "temperature, recorded": Fault(
        f"temperature {COLD} in the run's settings, log-probs at 1",
        "temperature 1",
        partial(drawn, lambda request: request, 1.0),
        {"rollout": {"temperature": COLD}},
        "vime#69: raw log-probs are those before the temperature",
    ),
}


# -- runs ------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def said(fault: Fault, model: str, change: dict[str, Any]) -> dict[str, Any]:
    """Make a run with a fault; return what was said in its first step, and whether that names it."""
    handler = Lines()
    logger = logging.getLogger("lowroll")
    logger.addHandler(handler)
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / "model"
        shutil.copytree(resolve(model), folder)
        (folder / "MANIFEST.json").unlink(missing_ok=True)
        own = {"model": str(folder), "output_dir": str(Path(room) / "run")}
        tree = merged(merged(merged(SETTINGS, change), fault.change), own)
        ended = ""
        try:
            with fault.inject(folder):
                first = run(tree).records[0]
        except RunFailed as error:
            ended, first = str(error), {}
        finally:
            logger.removeHandler(handler)
    lines = [line for line in (*handler.lines, ended) if line.startswith(SPOKEN)]
    early = [line for line in lines if not line.startswith("guard: step 2")]
    named = any(fault.named in line for line in early) if fault.named else not early
    kl = first.get("mismatch/kl_k3")
    return {"fault": fault.what, "said": early, "named": named, "kl": kl, "ended": bool(ended)}


HEAD = (
    "fault",
    "KL of the first step",
    "what lowroll says in the first step",
    "named",
    "elsewhere",
)


def table(found: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    reported = {fault.what: fault.reported for fault in FAULTS.values()}
    return [
        (
            one["fault"],
            "-" if one["kl"] is None else f"{one['kl']:.1e}",
            "; ".join(one["said"]) or "nothing",
            "yes" if one["named"] else "no",
            reported.get(one["fault"], "") or "-",
        )
        for one in found
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, out=RESULTS, only=SomeOf(FAULTS), model="smollm2", change="{}")
    asked = parser.parse_args(arguments)
    found = []
    for name in asked.only:
        found.append(said(FAULTS[name], asked.model, json.loads(asked.change)))
        say(f"{name}: {'as it should be' if found[-1]['named'] else 'MISSED'}: {found[-1]['said']}")
    asked.out.mkdir(parents=True, exist_ok=True)
    record = here(model=asked.model, settings=SETTINGS, runs=found)
    (asked.out / "faults.json").write_text(json.dumps(record, indent=1) + "\n")
    print_table(HEAD, table(found), "faults")


if __name__ == "__main__":
    main()
