"""A race to a score: lowroll and TRL's GRPOTrainer learn one task from the same weights.

The model is SmolLM2-135M-Instruct after a short SFT on demonstrations of `arithmetic`, stored as an
ordinary folder of transformers. All sides of a seed start from it and draw the same prompts in the
same order. They have the same reward, batch, rollouts a prompt, rates, clip and number of updates,
and no KL to a reference. Every few steps they answer the same held-out prompts greedily, with the
clock stopped.

    lowroll int8_rotated    by its defaults with these rollouts (`correction: auto`)
    lowroll dense           by its defaults, rollouts in the dtype of the run: float32 on a CPU, bfloat16 on a GPU
    trl                     GRPOTrainer in the fastest of its settings (`bench.race_trl.SETTINGS`)

The settings of TRL that a device has are tried for two steps each before the race, on a GPU with the
largest micro-batch that fits; the fastest races. What could not be set up is said, and never counted.

    python -m bench.race [--steps 12] [--seeds 1] [--score S] [--device auto] [--only SIDE ...]
                         [--peer-python PATH] [--peer-setting NAME] [--peer-rows R]
                         [--subject FOLDER] [--shape NAME] [--change JSON] [--out FOLDER]

One side runs at a time, as a worker of `bench.peer`; the sides of a seed take turns, and another one
is first in the next seed. A side says

    {"ready": true, "about": {...}}                  versions, and how it draws and learns
    {"step": 0, "score": 0.31}                       the score on held-out prompts before the first step
    {"step": 1, "seconds": 9.1, "tokens": 812,       a step: its seconds without evaluations, the tokens
     "reward": 0.4, "kl": 1e-4, "score": 0.33,       drawn for it, their mean reward; KL and score where known;
     "generate": 5.1, "learn": 3.9, "publish": 0.1}  seconds of parts of the step, where known
    {"end": true, "peak_bytes": 3e9, "folder": "x"}  the model that it ends with, as a folder of transformers

`--score` is 0.3 on a CPU and 0.7 on a GPU, unless given. `--subject` is a folder to start from without
SFT; `--shape` starts from random weights of `bench.shapes`, which show the seconds of a step alone, on
the task `reverse-text`. `make trl` installs TRL into .venv-trl. Every record of every run is stored in
`race.json`, `race-gpu.json` or `race-gpu-SHAPE.json`, of which `docs/tables.py` makes tables. A run
that stands there is not made again, if it began with the same weights, on the same kind of machine,
with the same settings and steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

from bench import subject
from bench.experiment import SUMMED, Place, key, made_here, options, own_settings, short, store
from bench.harness import OneOf, device_of, merged, print_table, release, same_kind, say
from bench.peer import VLLM, Peer, PeerFailed
from bench.race_table import HEAD, columns, summary
from bench.race_trl import SETTINGS as PEER_SETTINGS
from bench.shapes import SHAPES, random_model
from bench.worker import on_gpu
from lowroll.config import RunConfig, from_mapping
from lowroll.model import hf
from lowroll.model.folder import resolve
from lowroll.model.spec import read_spec
from lowroll.runs.assembly import environments, models, trainer
from lowroll.runs.demo import reward_of
from lowroll.trainer.optim import learning_rate

ROOT = Path(__file__).parents[1]
MODEL = "smollm2"
START_S = 600.0  # seconds for a side to import, load its model and be ready
LINE_S = 3 * 3600.0  # seconds for the next line; lowroll's side writes all of them at its end
TRIAL_STEPS = 2
CPU_ROWS = 8  # TRL's rows a pass on a CPU, where more of them take memory and gain no speed
JUDGE = {"rollout": {"max_batch": 64, "cache_tokens": 16384}}  # by default it takes all memory
PEER_PYTHON = ROOT / ".venv-trl" / "bin" / "python"

SETTINGS: dict[str, Any] = {
    "env": [
        {
            "id": "arithmetic",
            "args": {
                "template": "{text}",
                "system": "Compute.",
                "min_steps": 1,
                "max_steps": 2,
                "max_operand": 9,
            },
        }
    ],
    "batch_size": 64,
    "rollouts_per_example": 8,
    "algorithm": "grpo",
    "loss": {"reduce": "token-mean"},
    "rollout": {"max_tokens": 40},
    "train": {"learning_rate": 1e-5, "weight_decay": 0.0},
    "eval": {"num_examples": 128, "interval": 3},
    "ckpt": {"interval": 10_000, "keep_last": 1},
    "sft": {"steps": 2, "batch_size": 16, "learning_rate": 5e-5},
}
ON_GPU: dict[str, Any] = {  # a step takes half a second there, so that more can be learnt
    "batch_size": 256,
    "sft": {"steps": 12},
    "train": {"learning_rate": 2e-5},
    "eval": {"num_examples": 512, "interval": 5},
}
SCORES = {"cpu": 0.3, "cuda": 0.7}
TRL = "trl"
SIDES: dict[str, dict[str, Any]] = {
    "lowroll int8_rotated": {"rollout": {"weights": "int8_rotated"}},
    "lowroll dense": {"rollout": {"weights": "dense"}},
    TRL: {},
}
# Random weights earn some of its reward, and not all alike. Without that no response has an advantage,
# and lowroll's learner leaves out the backward pass of such.
WITH_RANDOM_WEIGHTS: dict[str, Any] = {"env": [{"id": "reverse-text"}]}
SAME = ("steps", "settings", "warm_start", "before")  # what runs of one file share
Run = dict[str, Any]


# -- the subject and its prompts -------------------------------------------------------------------


def settings(side: str, seed: int, place: Place) -> dict[str, Any]:
    """Return the configuration of a side and a seed, as a user's YAML file would say it."""
    tree = merged(common(place.device, place.change), SIDES[side])
    return merged(tree, own_settings(side, seed, place))


def common(device: str, change: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all sides share on a device."""
    return merged(SETTINGS if device == "cpu" else merged(SETTINGS, ON_GPU), change)


def warm_start(place: Place, model: str) -> Run:
    """Write the model after its SFT as `folder/model`; return what is recorded of it."""
    cfg = from_mapping(settings("lowroll dense", 0, replace(place, steps=1)))
    return subject.warm(cfg, model, place.folder)


def shaped(place: Place, shape: str, model: str) -> Run:
    """Write random weights of a shape with the tokenizer of `model` as `folder/model`; return what is
    recorded of them."""
    tokenizer = resolve(model)
    config = SHAPES[shape] | {"eos_token_id": list(read_spec(tokenizer).eos_ids)}
    random = random_model(config, place.device)
    hf.save(random, place.folder / "model", tokenizer_from=tokenizer)
    return {"shape": shape, "weights": "random", "tokenizer": model}


def judged(tree: Mapping[str, Any], model: Path) -> float:
    """Return the mean reward of a model folder's greedy answers to the held-out prompts, by lowroll's
    engine with dense weights: the same judge for all sides."""
    cfg = from_mapping(merged(tree, JUDGE))
    assert cfg.eval.num_examples is not None  # SETTINGS say how many
    return reward_of(cfg, model, "dense", 0.0, cfg.eval.num_examples)


def write_prompts(cfg: RunConfig, path: Path, split: str, count: int) -> int:
    """Write the first prompts of a split as JSON lines, with their token ids; return the longest
    prompt's length in tokens."""
    (env,) = environments.make(cfg.env, cfg.seed).values()
    chat, longest = models.tokenizer(Path(cfg.model)), 0
    with path.open("w") as file:
        for index in range(count):
            prompt = env.prompt(index, split)
            ids = chat.encode_chat(prompt.messages)
            longest = max(longest, len(ids))
            file.write(json.dumps({"prompt": vars(prompt), "ids": ids}) + "\n")
    return longest


def plain(cfg: RunConfig, folder: Path) -> dict[str, Any]:
    """Return what a run's configuration means to TRL, with its prompts in files of `folder`."""
    one, steps, optim = cfg.env[0], cfg.train.max_steps, trainer.optim(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"train": steps * cfg.num_groups, "test": cfg.eval.num_examples or 0}
    paths = {split: folder / f"{split}.jsonl" for split in counts}
    longest = max(write_prompts(cfg, paths[split], split, n) for split, n in counts.items())
    return {
        "model": cfg.model,
        "output": str(folder / "final"),
        "env": {"id": one.id, "name": one.name, "args": dict(one.args)},
        **{split: str(path) for split, path in paths.items()},
        "seed": cfg.seed,
        "steps": steps,
        "interval": cfg.eval.interval,
        "minibatches": cfg.train.minibatches,
        "rates": [learning_rate(optim, i) for i in range(steps)],
        "fields": {  # of GRPOConfig
            "generation_batch_size": cfg.batch_size,
            "num_generations": cfg.rollouts_per_example,
            "max_completion_length": cfg.rollout.max_tokens,
            "vllm_max_model_length": longest + cfg.rollout.max_tokens,
            "epsilon": cfg.loss.eps_low,
            "epsilon_high": cfg.loss.eps_high,
            "learning_rate": optim.learning_rate,
            "adam_beta1": optim.betas[0],
            "adam_beta2": optim.betas[1],
            "adam_epsilon": optim.eps,
            "weight_decay": optim.weight_decay,
            "max_grad_norm": optim.max_grad_norm,
        },
    }


# -- a side ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launcher:
    """The start of a side: the device, and TRL's Python."""

    device: str
    peer_python: str

    def command(self, side: str) -> list[str]:
        """Return the command of a side."""
        if side == TRL:
            return [self.peer_python, "-m", "bench.race_trl"]
        return [sys.executable, "-m", "bench.race_lowroll"]

    def environment(self, with_vllm: bool) -> dict[str, str]:
        """Return the variables of a side, which finds the vLLM that is unpacked in
        LOWROLL_VLLM_PATH where it is asked for."""
        if not with_vllm:
            return {"HF_HUB_OFFLINE": "1"}
        paths = filter(None, map(os.environ.get, ("LOWROLL_VLLM_PATH", "PYTHONPATH")))
        said = {name: os.environ.get(name, value) for name, value in VLLM.items()}
        return {**said, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}


def raced(launcher: Launcher, side: str, order: Mapping[str, Any], with_vllm: bool = False) -> Run:
    """Run a side to its end; return its records, its end and what it said of itself. PeerFailed has
    its last words."""
    release()
    in_use = 0 if launcher.device == "cpu" else on_gpu()
    asked = {**order, "device": launcher.device, "bytes_before": in_use}
    environment, began, records = launcher.environment(with_vllm), time.monotonic(), []
    command = launcher.command(side)
    with Peer(asked, command, environment, START_S) as running:
        ready_s = time.monotonic() - began
        while not (line := running.next(f"a step of {side}", LINE_S)).get("end"):
            records.append(line)
            numbers = ", ".join(f"{name} {short(value)}" for name, value in line.items())
            say(f"{side}: {numbers}")
    return {
        "records": records,
        "about": running.ready["about"],
        "ready_s": short(ready_s),
        "wall_s": short(time.monotonic() - began),
        "peak_bytes": line["peak_bytes"],
        "folder": line["folder"],
    }


# -- TRL at its best -------------------------------------------------------------------------------


class Trial(NamedTuple):
    """A setting of TRL that was tried, and the seconds of its last step, or why it does not run."""

    setting: str
    micro: int
    seconds: float | None
    failed: str = ""


Try = Callable[[str, int], float]


def candidates(device: str) -> list[str]:
    """Return the settings of TRL that a device has."""
    if device == "cpu":
        return [name for name, one in PEER_SETTINGS.items() if not one.vllm]
    return [name for name, one in PEER_SETTINGS.items() if one.bf16]


def fitting(attempt: Try, setting: str, micro: int) -> Iterator[Trial]:
    """Yield the trials of a setting, with half the micro-batch as long as memory runs out."""
    while True:
        try:
            yield Trial(setting, micro, attempt(setting, micro))
            return
        except PeerFailed as error:
            yield Trial(setting, micro, None, str(error))
            if micro % 2 or "out of memory" not in str(error).lower():
                return
        micro //= 2


def fastest(trials: Sequence[Trial]) -> Trial:
    """Return the fastest trial. PeerFailed has why each failed, where all did."""
    if ran := [trial for trial in trials if trial.seconds is not None]:
        return min(ran, key=lambda trial: trial.seconds or 0.0)
    reasons = "; ".join(f"{one.setting}, {one.micro} rows: {one.failed}" for one in trials)
    raise PeerFailed(f"no setting of TRL runs: {reasons}")


def refuse_two_settings(runs: Sequence[Run], trials: Sequence[Trial]) -> None:
    """Raise ValueError where TRL's stored runs have another setting than the fastest, or other rows a
    pass: a race has one."""
    had = {
        (run["about"]["setting"], run["about"]["micro"]) for run in runs if run["variant"] == TRL
    }
    if not had or all(trial.seconds is None for trial in trials):
        return
    best = fastest(trials)
    if had != {(best.setting, best.micro)}:
        raise ValueError(
            f"--out: its runs of TRL have setting and rows {sorted(had)}, others would have "
            f"{(best.setting, best.micro)}: give another folder, or --peer-setting and --peer-rows"
        )


def tried(
    launcher: Launcher, cfg: RunConfig, folder: Path, names: Sequence[str], rows: int
) -> list[Trial]:
    """Try settings of TRL for some steps without evaluations, beginning with `rows` rows a pass; 0:
    all of an update."""
    order = plain(cfg, folder) | {"interval": None, "steps": TRIAL_STEPS}

    def attempt(setting: str, micro: int) -> float:
        asked = order | {"setting": setting, "micro": micro}
        found = raced(launcher, TRL, asked, PEER_SETTINGS[setting].vllm)
        seconds: float = found["records"][-1]["seconds"]
        return seconds

    update = cfg.batch_size // cfg.train.minibatches
    most = gcd(update, rows or update)
    return [trial for name in names for trial in fitting(attempt, name, most)]


# -- the command -----------------------------------------------------------------------------------


def turn(sides: Sequence[str], seed: int) -> list[str]:
    """Return the order of the sides for a seed: another one is first each time."""
    at = seed % len(sides)
    return [*sides[at:], *sides[:at]]


def earlier(path: Path, about: Mapping[str, Any]) -> Run:
    """Return the runs and trials of the file that did not fail, and the seconds that it took, where
    it is of the same weights, settings, steps and kind of machine; none of them otherwise."""
    record = json.loads(path.read_text()) if path.is_file() else {"machine": {}}
    same = all(record.get(name) == about[name] for name in SAME)
    if not same or not same_kind(record["machine"], about["machine"], "device", "threads"):
        return {"runs": [], "trials": [], "seconds": 0}
    return {
        "runs": [run for run in record["runs"] if "failed" not in run],
        "trials": [trial for trial in record["trials"] if not trial["failed"]],
        "seconds": record["seconds"],
    }


def race(
    launcher: Launcher,
    place: Place,
    args: argparse.Namespace,
    stored: Run,
    keep: Callable[..., None],
) -> list[Run]:
    """Run the sides of all seeds from `folder/model` that `stored` lacks (`earlier`); give `keep` all
    runs, and the trials of TRL, after each. Return all runs."""
    folder, trials = place.folder, [Trial(**trial) for trial in stored["trials"]]
    names = [args.peer_setting] if args.peer_setting else candidates(launcher.device)
    runs = stored["runs"]
    have = {key(run) for run in runs}
    order = [(side, seed) for seed in range(args.seeds) for side in turn(args.only, seed)]
    wanted = [one for one in order if one not in have]
    own: list[Trial] = []  # of the settings that may race
    if any(side == TRL for side, _ in wanted):
        untried = [name for name in names if name not in {trial.setting for trial in trials}]
        rows = args.peer_rows or (CPU_ROWS if launcher.device == "cpu" else 0)
        cfg = from_mapping(settings(TRL, 0, place))
        trials += tried(launcher, cfg, folder / "trial", untried, rows)
        own = [trial for trial in trials if trial.setting in names]
        refuse_two_settings(runs, own)
    for side, seed in wanted:
        try:
            tree = settings(side, seed, place)
            if side == TRL:
                best = fastest(own)
                chosen = {"setting": best.setting, "micro": best.micro}
                asked = plain(from_mapping(tree), folder / f"{TRL}-{seed}") | chosen
                found = raced(launcher, side, asked, PEER_SETTINGS[best.setting].vllm)
            else:
                found = raced(launcher, side, {"config": tree})
            end = {"judged": judged(tree, Path(found.pop("folder")))}
            named = {"variant": side, "seed": seed, "date": date.today().isoformat()}
            curves = columns(found.pop("records"))
            runs.append({**named, **end, **found, "curves": curves})
        except PeerFailed as error:
            say(f"{side}, seed {seed}: not run: {error}")
            runs.append({"variant": side, "seed": seed, "failed": str(error)[:500]})
        keep(runs, [trial._asdict() for trial in trials])
    return runs


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    return options(
        __doc__,
        SIDES,
        steps=12,
        seeds=1,
        score=0.0,
        peer_python=str(PEER_PYTHON),
        peer_setting=OneOf(PEER_SETTINGS),
        peer_rows=0,
        model=MODEL,
        subject=Path,
        shape=OneOf(SHAPES),
    )


def main(words: Sequence[str] | None = None) -> int:
    """Warm-start the model, run the sides and store what they did."""
    p = parser()
    args, began = p.parse_args(words), time.monotonic()
    args.device = device_of(p, args.device).type
    args.score = args.score or SCORES[args.device]
    launcher = Launcher(args.device, args.peer_python)
    kind = "gpu" if args.device == "cuda" else ""
    path = args.out / f"{'-'.join(filter(None, ('race', kind, args.shape)))}.json"
    with tempfile.TemporaryDirectory() as scratch:
        task = WITH_RANDOM_WEIGHTS if args.shape else {}
        change = merged(task, json.loads(args.change))
        place = Place(args.steps, Path(scratch), args.device, change)
        model = place.folder / "model"
        shared = common(args.device, place.change)
        about = made_here(args.device, steps=args.steps, score=args.score, settings=shared)
        if args.subject:
            model.symlink_to(args.subject.resolve())
            about["warm_start"] = {"sha256": subject.digest(model)}
        elif args.shape:
            about["warm_start"] = shaped(place, args.shape, args.model)
        else:
            about["warm_start"] = warm_start(place, args.model)
            say(f"SFT: {about['warm_start']}")
        about["before"] = judged(settings(TRL, 0, place), model)
        stored = earlier(path, about)

        def keep(runs: list[Run], trials: list[dict[str, Any]]) -> None:
            seconds = stored["seconds"] + round(time.monotonic() - began)
            store(path, about | {"seconds": seconds, "trials": trials}, list(runs), SIDES)

        runs = race(launcher, place, args, stored, keep)
    head = [name.format(score=args.score) for name in HEAD]
    print_table(head, summary(runs, args.score), SUMMED)
    print(path)
    return 1 if any("failed" in run for run in runs) else 0


if __name__ == "__main__":
    raise SystemExit(main())
