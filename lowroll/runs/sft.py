"""`lowroll sft`: a supervised warm start."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lowroll.config import RunConfig
from lowroll.config.train import SftConfig, TrainConfig
from lowroll.envs.base import Environment
from lowroll.metrics.live import duration
from lowroll.metrics.progress import phases
from lowroll.metrics.record import Record, read
from lowroll.model import hf, lora
from lowroll.model.folder import resolve
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.quant.format_budget import is_budget
from lowroll.quant.table import DEFAULT
from lowroll.runs import chosen_formats
from lowroll.runs.assembly import engines, environments, models
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.assembly.description import about, learned
from lowroll.runs.assembly.settings_from_config import Mirror
from lowroll.runs.checkpointing import Checkpointing
from lowroll.runs.folder import RunFolder
from lowroll.runs.memory import sizes
from lowroll.runs.session import RunResult, attempt, run_steps, tell
from lowroll.runs.stop import polite_stop
from lowroll.trainer.optim import OptimSettings
from lowroll.trainer.packing import num_fed
from lowroll.trainer.sft import (
    Demonstration,
    SftLearner,
    SftSettings,
    encode_all,
    read_demonstrations,
)
from lowroll.weights.publish import digest

log = logging.getLogger(__name__)

LINES = 20  # of progress in all
_SFT_OPTIM = Mirror(OptimSettings, SftConfig, TrainConfig, given=("total_steps",))
_SFT = Mirror(SftSettings, SftConfig, TrainConfig, RunConfig, given=("optim",))


def run_sft(cfg: RunConfig, *, resume: bool = False, overwrite: bool = False) -> RunResult:
    """Train by `cfg.sft`, and `cfg.train` for shared settings; return the run folder and its
    records.

    The trained model or adapter is `output_dir/final`. Other arguments and signals are as in
    `lowroll.run`.
    """
    refuse_ranks(cfg)
    cfg = cfg.resolved()
    with attempt(cfg, "sft", resume, overwrite) as folder:
        sft_run = SftRun(folder, resume)
        first_step = sft_run.resume() if resume else sft_run.begin()
        with progress(cfg.sft.steps) as show, polite_stop() as stop:
            signal = run_steps(sft_run, first_step, cfg.sft.steps, cfg.ckpt.interval, show, stop)
    return RunResult(folder.path, read(folder.path), signal=signal)


def settings(cfg: RunConfig) -> SftSettings:
    optim = _SFT_OPTIM(cfg.sft, cfg.train, total_steps=cfg.sft.steps)
    return _SFT(cfg.sft, cfg.train.sized(), cfg, optim=optim)


def refuse_ranks(cfg: RunConfig) -> None:
    if cfg.train.gpus > 1:
        raise ValueError(
            f"train.gpus: {cfg.train.gpus}: lowroll sft learns on one GPU; write train.gpus=1"
        )


def warm_start(cfg: RunConfig, source: Path, target: Path) -> dict[str, float]:
    """Train the model of folder `source`, publish it as `target`, and return the last metrics."""
    cfg = cfg.model_copy(update={"model": str(source)})
    learner = _build_learner(cfg, Compute.of(cfg))
    metrics: dict[str, float] = {}
    with progress(cfg.sft.steps) as show:
        for step in range(1, cfg.sft.steps + 1):
            metrics = learner.step()
            show({"step": step, **metrics})
    publish(cfg, learner, cfg.sft.steps, target)
    return metrics


class SftRun:
    """A supervised run."""

    def __init__(self, home: RunFolder, resume: bool) -> None:
        self.cfg = home.cfg
        self.home = home
        self.checkpoints = Checkpointing(home, resume)
        self.compute = Compute.of(self.cfg)
        self.learner = _build_learner(self.cfg, self.compute)
        self.checkpoints.identify(digest(self.learner.model))

    def begin(self) -> int:
        self.home.begin(_describe_run(self.cfg, self.compute, self.learner))
        return 1

    def resume(self) -> int:
        checkpoint = self.checkpoints.take()
        if checkpoint is None:
            return self.begin()
        self.learner.restore(checkpoint.tensors, checkpoint.state)
        self.home.resume(checkpoint.step, _describe_run(self.cfg, self.compute, self.learner))
        log.info("resumed after step %d", checkpoint.step)
        return checkpoint.step + 1

    def step(self, step: int) -> Record:
        began = time.monotonic()
        metrics = self.learner.step()
        metrics |= {"time/step": time.monotonic() - began}
        return self.home.record(step, metrics)

    def drop(self, step: int) -> None:
        """Raise AssertionError: a step is short, and never dropped."""
        raise AssertionError(f"step {step} was dropped")

    def checkpoint(self, step: int) -> None:
        self.checkpoints.save(step, self.learner.state)

    def finish(self, step: int) -> None:
        self.checkpoint(step)
        self.home.publish(partial(publish, self.cfg, self.learner, step))


def publish(cfg: RunConfig, learner: SftLearner, step: int, target: Path) -> None:
    source = resolve(cfg.model)
    if cfg.train.lora:
        lora.save(learner.model, target, base=str(source), tokenizer_from=source)
    else:
        hf.save(learner.model, target, source, step)


@contextmanager
def progress(steps: int) -> Iterator[Callable[[Record], str]]:
    """Yield `show(record)`, which returns a step's line, moves the bar and prints some lines."""
    began = time.monotonic()
    first_step = 0
    with phases() as on_phase:

        def show(record: Record) -> str:
            nonlocal first_step
            step = int(record["step"])
            first_step = first_step or step
            seconds_a_step = (time.monotonic() - began) / (step - first_step + 1)
            seconds_left = seconds_a_step * (steps - step)
            line = (
                f"step {step:>4}/{steps}  loss {_format_metric(record['sft/loss'], '.4f')}  lr "
                f"{record['optim/lr']:.1e}  grad norm {_format_metric(record['optim/grad_norm'], '.3g')}  "
                f"eta {duration(seconds_left)}"
            )
            on_phase("sft", step, steps)
            if step in (1, steps) or step % max(1, steps // LINES) == 0:
                print(line, file=sys.stderr)
            return line

        yield show


def _format_metric(value: float | None, spec: str) -> str:
    return "nan" if value is None else format(value, spec)


def _build_learner(cfg: RunConfig, compute: Compute) -> SftLearner:
    cfg = chosen_formats.settled(plain(cfg), Path(cfg.output_dir), compute)
    chat, training_examples = models.chat_of(cfg), examples(cfg)
    sized_cfg = _choose_sizes(cfg, compute, chat, training_examples)
    tell(*(note for note in sized_cfg.notes if note not in cfg.notes))
    return SftLearner(
        models.learner(sized_cfg, compute), chat, training_examples, settings(sized_cfg)
    )


def _choose_sizes(
    cfg: RunConfig, compute: Compute, chat: ChatTokenizer, given: Sequence[Demonstration]
) -> RunConfig:
    outline = models.outline("model", cfg.model, compute)
    spec = outline.spec
    lengths = map(num_fed, encode_all(chat, given, spec.vocab_size, spec.max_position))
    max_length = max(lengths, default=1) + 1  # a demonstration's last token is not fed
    return sizes.chosen_for_sft(cfg, compute, outline, max_length, max_length * cfg.sft.batch_size)


def _describe_run(cfg: RunConfig, compute: Compute, learner: SftLearner) -> Mapping[str, str]:
    common_lines = about(cfg, compute, learner.model.spec)
    source = cfg.sft.data or ", ".join(env.name or env.id for env in cfg.env)
    return {
        "title": common_lines["title"],
        "model": common_lines["model"],
        "learning": f"supervised, {learned(cfg)}, {cfg.train.optimizer}, learning rate "
        f"{cfg.sft.learning_rate:g}",
        "data": f"{len(learner.samples):,} demonstrations of {source}, {cfg.sft.batch_size} a step",
        "device": common_lines["device"],
    }


def plain(cfg: RunConfig) -> RunConfig:
    """Return the settings without those of the following run. ValueError for an adapter on a
    budget's base."""
    dense_settings = {"uaq_scale": None, "forward": "dense", "backward": "dense"}
    if is_budget(cfg.rollout.weights):
        if cfg.train.lora:
            raise ValueError(
                f"rollout.weights: {cfg.rollout.weights}: lowroll sft searches for no formats, and "
                "its adapter needs their base; write a format"
            )
        cfg = engines.with_rollout(cfg, weights=DEFAULT)
    train = cfg.train.model_copy(update=dense_settings)
    return engines.with_rollout(cfg, exact=False).model_copy(update={"train": train})


def examples(cfg: RunConfig) -> list[Demonstration]:
    """Load the demonstrations. ValueError names the file and line, or the environment."""
    if cfg.sft.data is not None:
        return read_demonstrations(Path(cfg.sft.data))
    envs = environments.make(cfg.env, cfg.seed)
    weights = [env.weight for env in cfg.env]
    return demonstrations(
        list(zip(envs.values(), weights, strict=True)), cfg.sft.num_examples, cfg.seed
    )


def demonstrations(
    envs: Sequence[tuple[Environment, float]], count: int, seed: int = 0
) -> list[Demonstration]:
    """Return at most `count` gold answers of training tasks, one for each task. envs: with weights.

    An environment is left after 2 * count tasks, since an endless one may have no answers.
    ValueError if none has any.
    """
    rng = random.Random(f"demonstrations/{seed}")
    examples: list[Demonstration] = []
    next_tasks = [0] * len(envs)
    open_envs = list(range(len(envs)))
    while open_envs and len(examples) < count:
        open_weights = [envs[e][1] for e in open_envs]
        drawn = rng.choices(open_envs, open_weights)[0]
        env, _ = envs[drawn]
        task = next_tasks[drawn]
        next_tasks[drawn] += 1
        size = env.size("train")
        is_exhausted = size is not None and task >= size
        if is_exhausted or task >= 2 * count:
            open_envs.remove(drawn)
            continue
        prompt = env.prompt(task, "train")
        try:
            examples.append(Demonstration(prompt.messages, env.gold(prompt), env.tools))
        except NotImplementedError:
            continue
    if not examples:
        raise ValueError(
            f"env: {', '.join(env.name for env, _ in envs)} gave no gold answer to learn from"
        )
    return examples
