"""The train, infer and orch files of Surogate's GRPO document as one RunConfig.

`table.py` has every key and its differences here. The token loss is `correction: aipo` on
grpo_no_std advantages, averaged over the tokens of the batch. Without `launcher=local` the three
processes are one, and `notes` names keys without effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path as FilePath

from lowroll.config.build import Overrides, build, read, validate
from lowroll.config.document import ConfigError, Document, Mark
from lowroll.config.resolve import RunConfig
from lowroll.config.surogate import rules
from lowroll.config.surogate.rules import OWN_SERVER, File, Files
from lowroll.config.surogate.schema import RECIPES, InferFile, OrchFile, TrainFile
from lowroll.config.surogate.table import ROLES_ALONE, SECTIONS, TABLES
from lowroll.quant.table import is_dense

ATTACHED: tuple[str, ...] = ("client.base_url", "client.api_key_var")  # of rollout.vllm.url
MODELS: dict[str, type[TrainFile | InferFile | OrchFile]] = {
    "train": TrainFile,
    "infer": InferFile,
    "orch": OrchFile,
}


def load_surogate(
    train: str | FilePath,
    infer: str | FilePath | None,
    orch: str | FilePath,
    overrides: Overrides = (),
) -> RunConfig:
    """Load three files. ConfigError as in `load`."""
    documents = {"train": read(train), "orch": read(orch)}
    documents["infer"] = read(infer) if infer else Document({}, name="infer")
    return combine(documents, overrides)


def load_sections(document: Document, overrides: Overrides = ()) -> RunConfig:
    """Load one file with the sections train, orch and optionally infer."""
    for key in document.value:
        if key not in SECTIONS:
            raise ConfigError(
                document.marks[(key,)].blame(
                    "unknown key beside the sections train, infer and orch"
                )
            )
    documents = {}
    for section in SECTIONS:
        value = document.value.get(section)
        if value is None and section != "infer":
            raise ConfigError(f"{document.name}: {section}: this section is required")
        if not isinstance(value, dict | None):
            raise ConfigError(document.marks[(section,)].blame("must be a section of keys"))
        marks = document.marks_at((section,))
        documents[section] = Document(value or {}, marks, document.name)
    return combine(documents, overrides)


def combine(
    documents: Mapping[str, Document], overrides: Overrides = (), role: str = ""
) -> RunConfig:
    """Return the run of three documents. role: of a process with only one of them. One ConfigError
    has the problems of all files, or else those between files."""
    files: Files = {}
    problems: list[str] = []
    for section, model in MODELS.items():
        try:
            files[section] = File(documents[section], validate(model, documents[section]))
        except ConfigError as error:
            problems.append(str(error))
    if not problems:
        problems = list(rules.disagreements(files))
    if problems:
        raise ConfigError("\n".join(problems))
    if not isinstance(overrides, Mapping):
        overrides = list(overrides)
    run, noted_settings = _run(files, role)
    # the used keys depend on the engine and the weights, which overrides may change
    preview = build(deepcopy(run), overrides)
    if preview.rollout.engine == "vllm":
        _put_vllm(run, files, attach=preview.launcher == "none" and not role)
    else:
        _put_native(run, files)
    noted_settings += _put_recipe(run, files["train"], preview)
    cfg = build(run, overrides)
    notes = [
        setting.note
        for setting in noted_settings
        if setting.path not in run.marks or run.marks[setting.path].where != "override"
    ]
    if not role:
        notes += _idle_notes(files, cfg)
    return cfg.with_notes(*notes)


def _run(files: Files, role: str) -> tuple[Document, list[rules.Setting]]:
    run = Document({}, name=files["train"].document.name)
    noted_settings = []
    for section, table in TABLES.items():
        for key, row in table.items():
            if row.copied:
                _put(run, files[section], key, row.to[0])
    for key in ("env", "filters"):
        _put(run, files["orch"], key, key)
    if files["train"]["noise_scheduler.enabled"]:
        for key in ("sigma_start", "sigma_end", "num_stages"):
            _put(run, files["train"], f"noise_scheduler.{key}", f"noise.{key}")
    for setting in rules.settings(files, role):
        if setting.value is not None:
            run.put(setting.path, setting.value, setting.source or Mark(run.name, setting.key))
        if setting.note:
            noted_settings.append(setting)
    marks = files["orch"].document.marks
    run.marks |= {path: mark for path, mark in marks.items() if path[:1] == ("eval",)}
    _place_environments(run, files["orch"])
    return run, noted_settings


def _put(run: Document, source: File, source_key: str, key: str) -> None:
    path, source_path = tuple(key.split(".")), tuple(source_key.split("."))
    run.put(path, source[source_key], source.mark(source_key))
    for rest, mark in source.document.marks_at(source_path).items():
        run.marks[path + rest] = mark


def _place_environments(run: Document, orch: File) -> None:
    ratios = orch["buffer.env_ratios"]
    envs = run.value["env"]
    for index, env in enumerate(envs):
        del env["address"]
        if ratios is not None and ratios[index] > 0:
            mark = orch.document.marks[("buffer", "env_ratios")]
            run.put(("env", index, "weight"), ratios[index], mark)
    if ratios is not None:
        run.value["env"] = [env for env, ratio in zip(envs, ratios, strict=True) if ratio > 0]


def _put_recipe(run: Document, train: File, preview: RunConfig) -> Iterator[rules.Setting]:
    format, base = RECIPES.get(train["recipe"]), preview.rollout.weights
    if format is None:
        return
    if preview.train.lora and not is_dense(base) and base != format:
        yield rules.Setting(
            "train.forward",
            note=f"recipe {train['recipe']}: the adapter's base is {base}, and the learner "
            "multiplies with what it holds",
        )
        return
    forward = "aligned" if base == format else format
    run.put(("train", "forward"), forward, train.mark("recipe"))


def _put_vllm(run: Document, files: Files, attach: bool) -> None:
    infer, orch = files["infer"], files["orch"]
    for key, target in (
        ("tp", "tensor_parallel_size"),
        ("gpu_memory_utilization", "gpu_memory_utilization"),
        ("max_lora_rank", "max_lora_rank"),
    ):
        if infer.written(key) and infer[key] is not None:
            _put(run, infer, key, f"rollout.vllm.{target}")
    if infer["dtype"] == "float16":
        _put(run, infer, "dtype", "rollout.vllm.dtype")
    serve_args = {
        ("enforce_eager", True): "--enforce-eager",
        ("enable_prefix_caching", True): "--enable-prefix-caching",
        ("enable_prefix_caching", False): "--no-enable-prefix-caching",
    }
    used = {key: word for (key, value), word in serve_args.items() if infer[key] is value}
    if used:
        mark = infer.mark(next(iter(used)))
        run.put(("rollout", "vllm", "serve_args"), list(used.values()), mark)
    urls = orch["client.base_url"]
    if attach and len(urls) == 1 and urls != [OWN_SERVER]:
        mark = orch.document.mark(("client", "base_url")) or orch.mark("client")
        run.put(("rollout", "vllm", "url"), urls[0], mark)
        run.put(("client", "base_url"), [], mark)
        if orch.written("client.api_key_var"):
            _put(run, orch, "client.api_key_var", "rollout.vllm.token_env")


def _put_native(run: Document, files: Files) -> None:
    """Copy the settings of lowroll's own engine. ConfigError for those that need vLLM."""
    infer = files["infer"]
    needs_vllm = "needs vLLM: the override rollout.engine=vllm"
    if infer["tp"] > 1:
        raise ConfigError(infer.mark("tp").blame(needs_vllm))
    if infer["dtype"] == "float16":
        reason = f"lowroll's own engine has no float16; {needs_vllm}"
        raise ConfigError(infer.mark("dtype").blame(reason))
    if infer["enforce_eager"]:
        run.put(("rollout", "cuda_graphs"), False, infer.mark("enforce_eager"))
    if infer["enable_prefix_caching"] is False:
        run.put(("rollout", "prefix_caching"), False, infer.mark("enable_prefix_caching"))
    if infer.written("gpu_memory_utilization"):
        _put(run, infer, "gpu_memory_utilization", "rollout.gpu_memory_utilization")


def _idle_notes(files: Files, cfg: RunConfig) -> Iterator[str]:
    if cfg.launcher != "none":
        return
    skipped = (
        "max_async_level",  # has its own note
        *(("client.timeout",) if cfg.rollout.engine == "vllm" else ()),
        *(ATTACHED if cfg.rollout.vllm.url is not None else ()),
    )
    idle = [
        f"{mark.key} ({mark.where})"
        for section, keys in ROLES_ALONE.items()
        for key in keys
        if key not in skipped and (mark := files[section].written(key))
    ]
    if idle:
        yield f"no effect in one process: {', '.join(idle)}"
