"""The identity of a checkpoint's run: its settings, and its other inputs. A resumed run must have
the same.

    model                        what config.json says, key by key, and the files of its tokenizer and chat template
    train.teacher, critic.model  what their config.json says
    sft.data                     of a supervised run
    env                          the Python file that an environment is, and every file that one of its arguments names,
                                 those of its reward functions too
    advantage_function           its file, and those that its arguments name

are recorded by their values and SHA-256 digests; weights have digests of their own
(`weights.publish`). Not covered are modules that an environment's file imports, folders, data sets
of the hub, and the versions of packages.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lowroll.config import EnvConfig, RunConfig
from lowroll.config.data import BufferConfig
from lowroll.config.processes import AsynchronyConfig
from lowroll.config.renamed import renamed_tree
from lowroll.envs.table import split_file
from lowroll.model.folder import TOKENIZER_FILES, resolve
from lowroll.model.spec import read_config, read_spec

# Settings that may differ between a run and its resumption, because they do not change what a step
# computes. The guard and `no_signal` act between steps and follow the new settings. The number of
# GPUs changes only the order of sums.
MAY_CHANGE = (
    "output_dir",
    "ckpt",
    "score.workers",
    "score.max_error_rate",
    "eval",
    "guard",
    "force",
    "rollout.release_cache",
    "rollout.vllm",
    "dapo.no_signal",
    "client",
    "serve",
    "rollout_transport",
    "weight_broadcast",
    "launcher",
    "ray",
    "logging_steps",
    "track",
    "track_project",
    "push_to_hub",
    "rollout.cuda_graphs",
    "train.gpus",
    "train.sharding",
)
# may change too, after a run that ended for lack of a learning signal
FOR_SIGNAL = ("dapo.dynamic_sampling", "dapo.max_rounds")
# later settings, and the earlier behaviour
ADDED: dict[str, object] = {
    "rollout.engine": "native",
    "rollout.max_model_len": None,
    "rollout.seed": None,
    "rollout.prefix_caching": True,
    "rollout.turn_caching": False,
    "rollout.gpu_memory_utilization": None,
    "advantage_function": None,
    "track": [],
    "track_project": "lowroll",
    "push_to_hub": None,
    **{f"buffer.{key}": value for key, value in BufferConfig().model_dump(mode="json").items()},
    **{
        f"asynchrony.{key}": value
        for key, value in AsynchronyConfig().model_dump(mode="json").items()
    },
}
TEACHER = "train.teacher: weights"  # read long after the other inputs
CONFIG = "config.json: "  # prefix of its keys
ADVANTAGES = "advantage_function: "  # prefix of its files
IDLE_FILES = (
    "generation_config.json",
)  # copied along; its ends of sequence are recorded with the config


def read_by(cfg: RunConfig, command: str = "grpo") -> dict[str, str]:
    """Return the inputs of a command's run beside its settings and weights: name -> value or
    digest."""
    found = {f"model: {CONFIG}{key}": value for key, value in _meaning(cfg.model).items()}
    folder = resolve(cfg.model)
    found |= {
        f"model: {name}": _digest(folder / name)
        for name in TOKENIZER_FILES
        if name not in IDLE_FILES and (folder / name).is_file()
    }
    if command == "sft":
        if cfg.sft.data is not None:
            return found | {"sft.data": _digest(Path(cfg.sft.data))}
        return found | _read_by_environments(cfg)
    beside = {
        "train.teacher": cfg.train.teacher,
        "critic.model": cfg.critic.model if cfg.has_critic else None,
    }
    for key, source in beside.items():
        if source is not None:
            found |= {
                f"{key}: {CONFIG}{name}": value for name, value in _meaning(source, key).items()
            }
    return found | _read_by_environments(cfg) | _read_by_advantages(cfg)


def _read_by_environments(cfg: RunConfig) -> dict[str, str]:
    return {
        f"env {env.name or env.id}: {name}": _digest(path)
        for env in cfg.env
        for name, path in _files(env)
    }


def _read_by_advantages(cfg: RunConfig) -> dict[str, str]:
    own = cfg.advantage_function
    named = () if own is None else _named({"import_path": own.import_path, **own.kwargs})
    return {f"{ADVANTAGES}{name}": _digest(path) for name, path in named}


def _meaning(source: str | Path, key: str = "model") -> dict[str, str]:
    """Return the keys of config.json that affect the model or the tokenizer's loader."""
    folder = resolve(source, key=key)
    spec = read_spec(folder)
    said = {field.name: repr(getattr(spec, field.name)) for field in fields(spec) if field.compare}
    return said | {"model_type": repr(read_config(folder).get("model_type"))}


def _files(env: EnvConfig) -> Iterator[tuple[str, Path]]:
    code, _ = split_file(env.id)
    if code is not None:
        yield "its code", code
    yield from _named(env.args)


def _named(args: Mapping[str, object]) -> Iterator[tuple[str, Path]]:
    for key, value in args.items():
        for text in texts(value):
            start, colon, _ = text.partition(".py:")  # a function of a file
            path = f"{start}.py" if colon else text
            if os.path.isfile(path):  # Path.is_file raises for a long text
                yield key if text == value else f"{key}: {text}", Path(path)


def texts(value: object) -> Iterator[str]:
    """Yield every text in JSON data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        for inside in inner:
            yield from texts(inside)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def refuse_other_files(saved: Mapping[str, str] | None, now: Mapping[str, str]) -> None:
    """Raise ValueError naming inputs that differ from the saved ones. saved: None from before
    checkpoints held them."""
    if saved is None:
        raise ValueError(
            "resume: the checkpoint is of an older lowroll and does not say what the run reads "
            "(tokenizer, data): continue it there, or begin a run with the model that it exports"
        )
    # older checkpoints lack these
    later = (CONFIG, ADVANTAGES)
    known = {k: v for k, v in now.items() if k in saved or not any(one in k for one in later)}
    _refuse("the run does not read what it began with", saved, known, _text)


def refuse_other_settings(
    saved: dict[str, Any], cfg: RunConfig, more: tuple[str, ...] = (), of: str = "the checkpoint"
) -> None:
    """Raise ValueError naming settings that differ from the checkpoint's (or the run's) and may
    not.

    What a step computes may not change, except for settings of `more`. A run may be lengthened when
    nothing is scheduled over its length.
    """
    before = ADDED | _flatten({"chat_template_kwargs": {}} | renamed_tree(saved))
    after = _flatten(cfg.tree())
    unscheduled = (
        cfg.train.lr_scheduler_type == "constant"
        and cfg.rollout.temp_scheduler is None
        and cfg.noise is None
    )
    free = [*MAY_CHANGE, *more]
    if unscheduled:
        free.append("train.max_steps")
    if cfg.sft.lr_scheduler_type == "constant":
        free.append("sft.steps")
    if cfg.rollout.exact:  # any number of engines draws the same
        free.append("rollout.engines")
    held = {
        key
        for key in before.keys() | after.keys()
        if not any(key == name or key.startswith(f"{name}.") for name in free)
    }
    held -= {key for key in before.keys() & after.keys() if _same(before[key], after[key])}
    apart = [one for key in held for one in _apart(key, before.get(key), after.get(key))]
    _refuse(
        f"the configuration is not that of {of}",
        {key: old for key, old, _ in apart},
        {key: new for key, _, new in apart},
        repr,
    )


def refuse_to_remove(gone: Iterable[Path], cfg: RunConfig) -> None:
    """Raise ValueError when the settings name something that a new run would remove."""
    removed = [path.resolve() for path in gone]
    settings = {key: value for key, value in cfg.tree().items() if key != "output_dir"}
    for text in texts(settings):
        if os.path.exists(text) and any(
            Path(text).resolve().is_relative_to(path) for path in removed
        ):
            raise ValueError(
                f"output_dir: the run reads {text}, which a new run in "
                f"{Path(cfg.output_dir)} would replace: name another folder"
            )


def _apart(key: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences of two settings, as deep as they can be named: (place, before, after)."""
    if _same(before, after):
        return
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _apart(f"{key}[{i}]", old, new)
    elif isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys((*before, *after)):
            yield from _apart(f"{key}.{name}", before.get(name), after.get(name))
    else:
        yield key, before, after


def _same(before: object, after: object) -> bool:
    """Return whether two settings are equal, or name files and folders that only moved: digests
    cover their content."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(
            _same(before[key], after[key]) for key in before
        )
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    moved = (
        isinstance(before, str)
        and isinstance(after, str)
        and os.path.isabs(after)
        and os.path.exists(after)
    )
    return (
        before == after or moved and os.path.basename(str(before)) == os.path.basename(str(after))
    )


def _refuse(
    what: str, before: Mapping[str, Any], after: Mapping[str, Any], show: Callable[[Any], str]
) -> None:
    changed = sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    if changed:
        words = "; ".join(
            f"{key} was {show(before.get(key))} and is {show(after.get(key))}"
            for key in changed[:5]
        )
        raise ValueError(f"resume: {what}: {words}")


def _text(value: str | None) -> str:
    if value is None:
        return "not there"
    return f"{value[:19]}..." if value.startswith("sha256:") else value


def _flatten(tree: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value
        for name, branch in tree.items()
        for key, value in _flatten(branch, f"{prefix}.{name}" if prefix else str(name)).items()
    }
