"""The identity of a checkpoint's run: the settings and inputs that a resumed run must share.

    model                        config.json by key, the files of its tokenizer and chat template
    train.teacher, critic.model  config.json by key
    sft.data                     of a supervised run
    env                          its Python file, and every file that one of its arguments names
    advantage_function           its file, and those that its arguments name

Files are recorded by SHA-256 digests; `weights.publish` has digests of the weights. Not covered:
modules imported by an environment's file, folders, hub data sets, packages.
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
from lowroll.model.families.base import MixtureSpec, Rope
from lowroll.model.folder import TOKENIZER_FILES, resolve
from lowroll.model.spec import ModelSpec, read_config, read_spec

# A resumption may change these: they do not affect a step's computation. The number of GPUs changes
# only the order of sums.
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
# After a run that ended without a learning signal.
FOR_SIGNAL = ("dapo.dynamic_sampling", "dapo.max_rounds")
# Settings that older checkpoints lack, with their values then.
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
TEACHER = "train.teacher: weights"
CONFIG = "config.json: "  # prefix of its keys
ADVANTAGES = "advantage_function: "  # prefix of its files
# Fields of a spec that are always recorded.
FIRST_FIELDS = frozenset(
    {
        *("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers"),
        *("num_heads", "num_kv_heads", "head_dim", "norm_eps", "max_position", "tie_embeddings"),
        *("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "eos_ids", "num_experts"),
        *("experts_per_token", "moe_intermediate_size", "norm_topk_prob"),
    }
)
# Recorded names of a mixture's fields.
MIXTURE_NAMES = {
    "expert_size": "moe_intermediate_size",
    "shared_size": "shared_expert_size",
    "shared_gate": "shared_expert_gate",
    "renormalize": "norm_topk_prob",
    "has_biases": "expert_bias",
    "stacked": "stacks_experts",
}
IDLE_FILES = ("generation_config.json",)  # its ends of sequence are recorded with the config


def run_inputs(cfg: RunConfig, command: str = "grpo") -> dict[str, str]:
    """Return a run's inputs beside settings and weights: name -> value or digest."""
    inputs = {f"model: {CONFIG}{key}": value for key, value in _config_values(cfg.model).items()}
    folder = resolve(cfg.model)
    inputs |= {
        f"model: {name}": _digest(folder / name)
        for name in TOKENIZER_FILES
        if name not in IDLE_FILES and (folder / name).is_file()
    }
    if command == "sft":
        if cfg.sft.data is not None:
            return inputs | {"sft.data": _digest(Path(cfg.sft.data))}
        return inputs | _read_by_environments(cfg)
    other_models = {
        "train.teacher": cfg.train.teacher,
        "critic.model": cfg.critic.model if cfg.has_critic else None,
    }
    for key, source in other_models.items():
        if source is not None:
            inputs |= {
                f"{key}: {CONFIG}{name}": value
                for name, value in _config_values(source, key).items()
            }
    return inputs | _read_by_environments(cfg) | _read_by_advantages(cfg)


def _read_by_environments(cfg: RunConfig) -> dict[str, str]:
    return {
        f"env {env.name or env.id}: {name}": _digest(path)
        for env in cfg.env
        for name, path in _files_of_env(env)
    }


def _read_by_advantages(cfg: RunConfig) -> dict[str, str]:
    function_cfg = cfg.advantage_function
    if function_cfg is None:
        return {}
    files = _files_named_in({"import_path": function_cfg.import_path, **function_cfg.kwargs})
    return {f"{ADVANTAGES}{name}": _digest(path) for name, path in files}


def _config_values(source: str | Path, key: str = "model") -> dict[str, str]:
    folder = resolve(source, key=key)
    values = _spec_values(read_spec(folder))
    return values | {"model_type": repr(read_config(folder).get("model_type"))}


def _spec_values(spec: ModelSpec) -> dict[str, str]:
    """Return a spec's fields as the first runs recorded them: later fields only if they are not at
    their default."""
    values = {}
    parts: tuple[ModelSpec | MixtureSpec, ...] = (spec, spec.mixture)
    for part in parts:
        for field in fields(part):
            name = MIXTURE_NAMES.get(field.name, field.name)
            value = getattr(part, field.name)
            if not field.compare or name in ("ropes", "mixture"):
                continue
            if name in FIRST_FIELDS or value != field.default:
                values[name] = repr(value)
    # The first runs knew one rope, and norms of heads only.
    rope = spec.ropes[0]
    values["rope_theta"] = repr(rope.theta)
    values["rope_scaling"] = _describe_scaling(rope)
    if spec.ropes != (Rope(rope.theta, spec.head_dim, rope.scaling),):
        values["ropes"] = repr(spec.ropes)
    first_names = {"": "False", "head": "True"}
    values["qk_norm"] = first_names.get(spec.qk_norm, spec.qk_norm)
    return values


def _describe_scaling(rope: Rope) -> str:
    scaling = rope.scaling
    if scaling is None or scaling.kind != "llama3":
        return repr(scaling)
    return (
        f"RopeScaling(factor={scaling.factor!r}, low_freq_factor={scaling.low!r}, "
        f"high_freq_factor={scaling.high!r}, "
        f"original_max_position={scaling.original_max_position!r})"
    )


def _files_of_env(env: EnvConfig) -> Iterator[tuple[str, Path]]:
    code, _ = split_file(env.id)
    if code is not None:
        yield "its code", code
    yield from _files_named_in(env.args)


def _files_named_in(args: Mapping[str, object]) -> Iterator[tuple[str, Path]]:
    for key, value in args.items():
        for text in texts(value):
            prefix, colon, _ = text.partition(".py:")  # a function of a file
            path = f"{prefix}.py" if colon else text
            if os.path.isfile(path):  # Path.is_file raises for a long text
                yield key if text == value else f"{key}: {text}", Path(path)


def texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        children = value.values() if isinstance(value, dict) else value
        for child in children:
            yield from texts(child)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def refuse_other_files(saved: Mapping[str, str] | None, now: Mapping[str, str]) -> None:
    """Raise ValueError naming inputs that differ from the saved ones (None in old checkpoints)."""
    if saved is None:
        raise ValueError(
            "resume: the checkpoint is of an older lowroll and does not say what the run reads "
            "(tokenizer, data): continue it there, or begin a run with the model that it exports"
        )
    comparable = {  # older checkpoints lack some inputs
        name: value
        for name, value in now.items()
        if name in saved or not (CONFIG in name or ADVANTAGES in name)
    }
    _raise_if_changed(
        "the run does not read what it began with", saved, comparable, _describe_input
    )


def refuse_other_settings(
    saved: dict[str, Any], cfg: RunConfig, more: tuple[str, ...] = (), of: str = "the checkpoint"
) -> None:
    """Raise ValueError naming settings that differ and may not. more: settings that may change
    too."""
    saved_settings = ADDED | _flatten({"chat_template_kwargs": {}} | renamed_tree(saved))
    current_settings = _flatten(cfg.tree())
    may_change = (*_may_change(cfg), *more)
    old_values: dict[str, Any] = {}
    new_values: dict[str, Any] = {}
    for key in saved_settings.keys() | current_settings.keys():
        if any(key == name or key.startswith(f"{name}.") for name in may_change):
            continue
        differences = _differences(key, saved_settings.get(key), current_settings.get(key))
        for inner_key, old, new in differences:
            old_values[inner_key], new_values[inner_key] = old, new
    _raise_if_changed(f"the configuration is not that of {of}", old_values, new_values, show=repr)


def _may_change(cfg: RunConfig) -> list[str]:
    settings = [*MAY_CHANGE]
    is_constant = cfg.train.lr_scheduler_type == "constant"
    if is_constant and cfg.rollout.temp_scheduler is None and cfg.noise is None:
        settings.append("train.max_steps")
    if cfg.sft.lr_scheduler_type == "constant":
        settings.append("sft.steps")
    if cfg.rollout.exact:  # any number of engines draws the same
        settings.append("rollout.engines")
    return settings


def refuse_to_remove(gone: Iterable[Path], cfg: RunConfig) -> None:
    """Raise ValueError when the settings name a file that a new run would remove."""
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


def _differences(key: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences(f"{key}[{i}]", old, new)
    elif isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys((*before, *after)):
            yield from _differences(f"{key}.{name}", before.get(name), after.get(name))
    elif before != after and not _is_moved_file(before, after):
        yield key, before, after


def _is_moved_file(before: object, after: object) -> bool:
    """Return whether a file of the same name replaces a path; digests cover the contents."""
    if not isinstance(before, str) or not isinstance(after, str):
        return False
    is_same_name = os.path.basename(before) == os.path.basename(after)
    return is_same_name and os.path.isabs(after) and os.path.exists(after)


def _raise_if_changed(
    what: str, before: Mapping[str, Any], after: Mapping[str, Any], show: Callable[[Any], str]
) -> None:
    changed_keys = sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    if changed_keys:
        changes_text = "; ".join(
            f"{key} was {show(before.get(key))} and is {show(after.get(key))}"
            for key in changed_keys[:5]
        )
        raise ValueError(f"resume: {what}: {changes_text}")


def _describe_input(value: str | None) -> str:
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
