"""The settings of a role that is started by hand with one file (docs/configuration.md).

The orchestrator stores its settings at RUN/orchestrator/given.yaml for the trainer. Every role also
takes lowroll's own run.yaml, and one file with the three sections.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path as FilePath
from typing import Any, Literal

import yaml

from lowroll.config.build import Overrides, build, override_pairs, read, validate
from lowroll.config.data import EnvConfig
from lowroll.config.document import ConfigDumper, ConfigError, Document, Mark, Path
from lowroll.config.resolve import RunConfig
from lowroll.config.surogate.read import MODELS, combine, load_sections

Role = Literal["serve", "orchestrate", "train"]
FILES: dict[str, str] = {"serve": "infer", "orchestrate": "orch", "train": "train"}
GIVEN = FilePath("orchestrator", "given.yaml")  # in the run's folder
# keys that run.yaml does not have
KEYS_OF_ROLES: dict[str, str] = {
    "serve": "enable_lora: true",
    "orchestrate": "model: {name: ...}",
    "train": "lora: true",
}


class NotThereYet(ConfigError):
    """An error for a trainer whose orchestrator has not stored its settings yet."""


def load_role(role: Role, path: str | FilePath, overrides: Overrides = ()) -> RunConfig:
    """Load a role's settings from one file.

    ConfigError as in `load`; NotThereYet for a trainer with train.yaml alone before the
    orchestrator has stored its settings.
    """
    document = read(path)
    if {"orch", "infer"} & document.value.keys():
        return load_sections(document, overrides)
    if _is_own(role, document):
        return build(document, overrides)
    pairs = override_pairs(overrides)
    if role == "serve":
        return _serve(document, pairs)
    if role == "orchestrate":
        return _orchestrate(document, pairs)
    return _train(document, pairs)


def _is_own(role: Role, document: Document) -> bool:
    """Return whether a file is lowroll's run.yaml. ConfigError if it could be both."""
    keys, name = document.value.keys(), f"{FILES[role]}.yaml"
    model = document.value.get("model")
    if role == "orchestrate" and isinstance(model, dict | str):
        return isinstance(model, str)
    num_own = len(keys & RunConfig.model_fields.keys())
    num_foreign = len(keys & MODELS[FILES[role]].model_fields.keys())
    if num_own == num_foreign == len(keys):
        example = KEYS_OF_ROLES[role]
        raise ConfigError(
            f"{document.name}: could be lowroll's run.yaml or the document's {name}; write one key "
            f"more, such as {example} of {name} or env: of run.yaml"
        )
    return num_own > num_foreign


def _serve(infer: Document, overrides: list[tuple[str, Any]]) -> RunConfig:
    model = _required(infer, "model")
    learner: dict[str, Any] = {"model": model, "lora": infer.value.get("enable_lora", True)}
    if isinstance(rank := infer.value.get("max_lora_rank"), int):
        learner["lora_rank"] = rank
    orch = {"env": [{"id": "reverse-text"}], "rollouts_per_example": 8}
    return combine(
        {
            "infer": infer,
            "train": Document(learner, {("model",): infer.marks[("model",)]}, infer.name),
            "orch": Document(orch, {}, infer.name),
        },
        dict(overrides),
        "serve",
    )


def _orchestrate(orch: Document, overrides: list[tuple[str, Any]]) -> RunConfig:
    model = orch.value.get("model")
    if not isinstance(model, dict) or "name" not in model:
        mark = orch.mark(("model",)) or Mark(orch.name, "model")
        raise ConfigError(Mark(mark.where, "model.name").blame("this key is required"))
    learner = {
        "model": model["name"],
        "lora": not {"lora_adapter", "lora_rank", "lora_alpha"}.isdisjoint(model),
        **{key: model[key] for key in ("lora_rank", "lora_alpha") if model.get(key) is not None},
    }
    marks: dict[Path, Mark] = {("model",): orch.marks[("model", "name")]}
    written = Document(deepcopy(orch.value), dict(orch.marks), orch.name)
    cfg = combine(
        {
            "orch": orch,
            "train": Document(learner, marks, orch.name),
            "infer": Document({}, name="infer"),
        },
        dict(overrides),
        "orchestrate",
    )
    return cfg.with_origin(given=_given(written, cfg, overrides))


def _given(orch: Document, cfg: RunConfig, overrides: list[tuple[str, Any]]) -> str:
    """Return the file with its resolved paths, and the overrides, as YAML. `orch` is changed. `cfg`
    has no environments of share 0."""
    tree = orch.value
    envs = _as_sections(tree["env"])
    ratios = (tree.get("buffer") or {}).get("env_ratios")
    if ratios is not None:
        envs = [env for env, ratio in zip(envs, ratios, strict=True) if ratio > 0]
    _put_environments(envs, cfg.env)
    if cfg.eval.env is not None and isinstance(tree.get("eval"), dict):
        _put_environments(_as_sections(tree["eval"]["env"]), cfg.eval.env)
    if cfg.advantage_function is not None and isinstance(tree.get("advantage"), dict):
        tree["advantage"] |= {"import_path": cfg.advantage_function.import_path}
    tree["model"]["name"] = cfg.model
    tree["output_dir"] = cfg.output_dir
    given = {"of": orch.name, "orch": tree, "overrides": dict(overrides)}
    return yaml.dump(given, Dumper=ConfigDumper, sort_keys=False, allow_unicode=True, width=10**6)


def _as_sections(value: Any) -> list[dict[str, Any]]:
    return value if isinstance(value, list) else [value]


def _put_environments(sections: list[dict[str, Any]], envs: tuple[EnvConfig, ...]) -> None:
    for section, env in zip(sections, envs, strict=False):  # overrides may add some
        section |= {"id": env.id, "args": env.args}


def _train(train: Document, overrides: list[tuple[str, Any]]) -> RunConfig:
    _required(train, "model")
    validate(MODELS["train"], train)  # before waiting for the orchestrator
    output_dir = dict(overrides).get("output_dir", train.value.get("output_dir", "output"))
    if not isinstance(output_dir, str):
        mark = train.marks.get(("output_dir",), Mark("override", "output_dir"))
        raise ConfigError(mark.blame("must be text"))
    run_folder = str(find_run(output_dir))
    given_file = str(run_folder / GIVEN)
    given = read(given_file)
    if set(given.value) != {"of", "orch", "overrides"}:
        raise ConfigError(f"{given_file}: was not written by an orchestrator")
    tree = given.value["orch"] | {"output_dir": run_folder}
    orch = Document(tree, given.marks_at(("orch",)), given_file)
    return combine(
        {"train": train, "orch": orch, "infer": Document({}, name="infer")},
        given.value["overrides"] | dict(overrides) | {"output_dir": run_folder},
        "train",
    )


def find_run(folder: str | FilePath) -> FilePath:
    """Return `folder` or its only `run_*` folder with a begun run. NotThereYet without one,
    ConfigError for several."""
    folder = FilePath(folder)
    if (folder / GIVEN).is_file():
        return folder
    runs = sorted(given_file.parent.parent for given_file in folder.glob(f"run_*/{GIVEN}"))
    if not runs:
        raise NotThereYet(
            f"output_dir: no orchestrator has begun a run in {folder} or in a run_* folder of it "
            "(lowroll orchestrate orch.yaml)"
        )
    if len(runs) > 1:
        names = ", ".join(map(str, runs))
        raise ConfigError(f"output_dir: {folder} holds several runs; name one of {names}")
    return runs[0]


def _required(document: Document, key: str) -> Any:
    if document.value.get(key) is None:
        mark = document.mark((key,)) or Mark(document.name, key)
        raise ConfigError(mark.blame("this key is required"))
    return document.value[key]
