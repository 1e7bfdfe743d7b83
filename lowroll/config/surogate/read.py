"""The train, infer and orch files of Surogate's GRPO document -> one RunConfig.

    lowroll grpo --train train.yaml --infer infer.yaml --orch orch.yaml      (or one file with the three sections)

What the files mean here:
1. Where a file is silent its documented default holds, except that checkpoints are made (every 50 steps), that
   max_steps is 100 when neither file bounds the run, and that AdamW's moments are in 8 bits only
   where the file says so (they need the extra `bnb`). The default of rollouts_per_example, 1, is
   refused: one rollout has no group.
2. The three processes are one process, on policy (async level 0, which every `max_async_level`
   allows): hosts, ports and transports have no effect; `notes` names those that were written.
   Rollouts come from lowroll's own engine, or with the override `rollout.engine=vllm` from vLLM,
   for which `tp`, `gpu_memory_utilization` and, where it is another than the document's default,
   `client.base_url` (a server that runs already) are read.
3. The token loss is `correction: aipo` on grpo_no_std advantages, averaged over the tokens of the
   batch: the same coefficients, token, geometric and sequence masks and denominator. The files have
   no key for the teacher that a `teacher_tau` needs: it is the override `train.teacher`.
4. An enabled `noise_scheduler` is our `noise` section, exponential, in its program's variant and
   with clean norms for the learner; the final norm takes no noise here.
5. Rollouts use the learner's own weights, as in the document; `rollout.weights=int8` is one
   override away (overrides use the names of `schema.py`). A number that several files repeat must
   be the same in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TypeVar

from pydantic import BaseModel

from lowroll.config.document import ConfigError, Document, Mark, Path
from lowroll.config.load import Overrides, build, read, validate
from lowroll.config.schema import RunConfig
from lowroll.config.surogate.schema import InferFile, OrchFile, TrainFile

M = TypeVar("M", bound=BaseModel)
SECTIONS = ("train", "infer", "orch")

# (file, key there, key of RunConfig): copied as it stands
COPIED: tuple[tuple[str, str, str], ...] = (
    ("train", "model", "model"),
    ("orch", "seed", "seed"),
    ("orch", "batch_size", "batch_size"),
    ("orch", "rollouts_per_example", "rollouts_per_example"),
    ("orch", "env", "env"),
    ("orch", "filters", "filters"),
    ("orch", "sampling.temperature", "rollout.temperature"),
    ("orch", "sampling.temp_scheduler", "rollout.temp_scheduler"),
    ("orch", "sampling.repetition_penalty", "rollout.repetition_penalty"),
    ("orch", "sampling.min_tokens", "rollout.min_tokens"),
    ("train", "loss", "loss.aipo"),
    *(
        ("train", key, f"train.{key}")
        for key in (
            "learning_rate",
            "lr_scheduler_type",
            "warmup_steps",
            "max_grad_norm",
            "weight_decay",
            "lora",
            "lora_rank",
            "lora_alpha",
            "lora_target_modules",
        )
    ),
)
# written in several files: (name, the places)
REPEATED: tuple[tuple[tuple[str, str], ...], ...] = (
    (("train", "model"), ("infer", "model"), ("orch", "model.name")),
    (("train", "max_steps"), ("orch", "max_steps")),
    (("train", "lora_rank"), ("orch", "model.lora_rank")),
    (("train", "lora_alpha"), ("orch", "model.lora_alpha")),
    (("train", "max_async_level"), ("orch", "max_async_level")),
    (("train", "transport_type"), ("orch", "rollout_transport.type")),
    (("infer", "weight_broadcast_type"), ("orch", "weight_broadcast.type")),
)
OWN_SERVER = ("http://localhost:8000/v1",)  # the document's default: the run's own
# accepted, and of no effect in one process
IDLE: dict[str, tuple[str, ...]] = {
    "train": ("zero_level", "logging_steps", "gradient_accumulation_steps", "transport_type"),
    "infer": (
        "host",
        "port",
        "enforce_eager",
        "max_loras",
        "max_cpu_loras",
        "enable_prefix_caching",
        "weight_broadcast_type",
    ),
    "orch": (
        "model.lora_adapter",
        "max_off_policy_steps",
        "client.timeout",
        "client.api_key_var",
        "client.skip_model_check",
        "client.elastic",
        "buffer.hash_keys",
        "report_to",
        "ckpt.wait_for_weights_timeout",
        "rollout_transport",
        "weight_broadcast",
        "eval.eval_base_model",
        "eval.skip_eval_on_resume",
        "eval.cancel_inflight_rollouts_on_eval",
    ),
}


@dataclass
class _File:
    """One file: its text with marks, its checked values, and how a key of it is blamed."""

    document: Document
    values: BaseModel
    tree: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.tree = self.values.model_dump(mode="json")

    def __getitem__(self, key: str) -> Any:
        value: Any = self.tree
        for part in key.split("."):
            value = value[part] if value is not None else None
        return value

    def written(self, key: str) -> Mark | None:
        return self.document.marks.get(tuple(key.split(".")))


Files = dict[str, _File]


def load_surogate(
    train: str | FilePath,
    infer: str | FilePath | None,
    orch: str | FilePath,
    overrides: Overrides = (),
) -> RunConfig:
    """Three files (`infer` may be absent) -> the run. Raises ConfigError like `load`."""
    documents = {"train": read(train), "orch": read(orch)}
    documents["infer"] = read(infer) if infer else Document({}, name="infer")
    return _combine(documents, overrides)


def load_sections(document: Document, overrides: Overrides = ()) -> RunConfig:
    """One file with the sections train, infer (may be absent) and orch -> the run."""
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
        marks = {
            path[1:]: mark
            for path, mark in document.marks.items()
            if path[0] == section and len(path) > 1
        }
        documents[section] = Document(value or {}, marks, document.name)
    return _combine(documents, overrides)


def _combine(documents: dict[str, Document], overrides: Overrides) -> RunConfig:
    files, problems = {}, []
    for section, model in (("train", TrainFile), ("infer", InferFile), ("orch", OrchFile)):
        try:
            files[section] = _File(documents[section], validate(model, documents[section]))
        except ConfigError as error:
            problems.append(str(error))
    if not problems:
        problems = list(_disagreements(files))
    if problems:
        raise ConfigError("\n".join(problems))
    run = Document({}, name=documents["train"].name)
    notes: list[tuple[Path, str]] = []
    for section, key, target in COPIED:
        _put(run, files[section], key, target)
    if files["train"]["noise_scheduler.enabled"]:
        for key in ("sigma_start", "sigma_end", "num_stages"):
            _put(run, files["train"], f"noise_scheduler.{key}", f"noise.{key}")
    for key, value, note in (*_lengths(files), *_switches(files), *_folders(files)):
        if value is not None:
            run.put(tuple(key.split(".")), value, _origin(files, key))
        if note:
            notes.append((tuple(key.split(".")), note))
    _place_environments(run, files["orch"])
    _put_vllm(run, files)
    cfg = build(run, overrides)
    _refuse_vllm(files, cfg)
    told = [
        note for path, note in notes if path not in run.marks or run.marks[path].where != "override"
    ]
    return cfg.with_notes(*told, *_idle_notes(files, cfg))


def _put(run: Document, source: _File, key: str, target: str) -> None:
    """Copy one value with the marks of everything beneath it."""
    path, old = tuple(target.split(".")), tuple(key.split("."))
    run.put(
        path, source[key], source.written(key) or Mark(source.document.name, f"{key} (default)")
    )
    for mark_path, mark in source.document.marks.items():
        if mark_path[: len(old)] == old:
            run.marks[path + mark_path[len(old) :]] = mark


# target key -> where it comes from, for the blame
_ORIGINS = {
    "rollout.max_tokens": ("orch", "sampling.max_tokens"),
    "train.tokens_per_microbatch": ("orch", "seq_len"),
    "train.optimizer": ("train", "optimizer"),
    "train.max_steps": ("orch", "max_steps"),
    "dtype": ("infer", "dtype"),
    "output_dir": ("orch", "output_dir"),
    "eval": ("orch", "eval"),
    "ckpt.interval": ("orch", "ckpt.interval"),
    "ckpt.keep_last": ("orch", "ckpt.keep_last"),
    "ckpt.keep_interval": ("orch", "ckpt.keep_interval"),
}


def _origin(files: Files, target: str) -> Mark:
    section, key = _ORIGINS.get(target, ("orch", target))
    return files[section].written(key) or Mark(files[section].document.name, f"{key} (default)")


def _disagreements(files: Files) -> Iterator[str]:
    for places in REPEATED:
        given = [(files[section].written(key), files[section][key]) for section, key in places]
        told = [
            (mark, value) for mark, value in given if mark is not None and value not in (None, -1)
        ]
        for mark, value in told[1:]:
            first_mark, first = told[0]
            if value != first:
                yield mark.blame(
                    f"{value} disagrees with {first_mark.where}: {first_mark.key}: {first}"
                )
    train, infer, orch = (files[section] for section in SECTIONS)
    for (part, part_key), (whole, whole_key) in (
        ((train, "lora_rank"), (infer, "max_lora_rank")),
        ((orch, "seq_len"), (train, "sequence_len")),
        ((orch, "sampling.max_tokens"), (infer, "max_model_len")),
    ):
        least, most = part.written(part_key), whole.written(whole_key)
        if (
            least
            and most
            and None not in (part[part_key], whole[whole_key])
            and whole[whole_key] < part[part_key]
        ):
            yield most.blame(
                f"{whole[whole_key]} is less than {least.where}: {least.key}: {part[part_key]}"
            )
    if train["lora"] and not infer["enable_lora"]:
        there = train.written("lora") or Mark(train.document.name, "lora (default)")
        yield infer.document.marks[("enable_lora",)].blame(
            f"false disagrees with {there.where}: {there.key}: true"
        )


# key of RunConfig, its value (None: leave the default), a note for people or ""
Setting = tuple[str, Any, str]


def _lengths(files: Files) -> Iterator[Setting]:
    train, orch = files["train"], files["orch"]
    if train.written("sequence_len") and not orch.written("seq_len"):
        packed = train["sequence_len"]
    else:
        packed = orch["seq_len"]
    yield "train.tokens_per_microbatch", packed * train["per_device_train_batch_size"], ""
    longest = orch["sampling.max_tokens"]
    if longest is None:
        longest = max(1, packed // 2)
        yield (
            "rollout.max_tokens",
            longest,
            f"sampling.max_tokens is not set: {longest}, half of the sequence length",
        )
    else:
        yield "rollout.max_tokens", longest, ""
    steps = [value for value in (orch["max_steps"], train["max_steps"]) if value not in (None, -1)]
    if steps:
        unbounded = ""
    else:
        unbounded = "warning: no max_steps in either file: the run stops after 100 steps"
    yield "train.max_steps", steps[0] if steps else 100, unbounded


def _switches(files: Files) -> Iterator[Setting]:
    train, infer, orch = (files[section] for section in SECTIONS)
    yield (
        "rollout.weights",
        "dense",
        (
            "rollout.weights: dense, as the files name no format; rollout.weights=int8 asks for "
            "INT8 rollouts"
        ),
    )
    yield "algorithm", "grpo_no_std", ""
    yield "advantage", "length_weighted" if orch["advantage.length_weighted_mean"] else None, ""
    yield "loss.reduce", "token-mean", ""
    yield (
        "correction",
        "aipo",
        "correction: aipo, because the files' token loss is AIPO's with masks (loss.aipo)",
    )
    yield "dtype", "bfloat16" if infer["dtype"] == "bfloat16" else "auto", ""
    if train["recipe"] != "bf16":
        yield (
            "",
            None,
            f"warning: recipe {train['recipe']}: FP8 training is not available yet, training runs "
            f"in dtype",
        )
    if train["optimizer"] == "adamw_8bit" and train.written("optimizer"):
        yield "train.optimizer", "adamw8bit", ""
    level = max(
        train["max_async_level"] if train.written("max_async_level") else 0, orch["max_async_level"]
    )
    if level > 0:
        yield (
            "",
            None,
            f"max_async_level {level}: rollouts always use the newest weights here (level 0)",
        )


def _folders(files: Files) -> Iterator[Setting]:
    train, orch = files["train"], files["orch"]
    inner = not orch.written("output_dir") and train.written("output_dir")
    yield (
        "output_dir",
        str(FilePath(train["output_dir"]) / "run_default") if inner else orch["output_dir"],
        "",
    )
    missing = orch["ckpt.interval"] is None
    yield "ckpt.interval", orch["ckpt.interval"], "ckpt.interval is not set: 50" if missing else ""
    yield "ckpt.keep_last", orch["ckpt.keep_last"], ""
    yield "ckpt.keep_interval", orch["ckpt.keep_interval"], ""
    if orch["eval"] is not None:
        evaluation = {
            key: orch["eval"][key]
            for key in ("interval", "rollouts_per_example", "env", "num_examples")
        }
        for env in evaluation["env"]:
            del env["address"]
        whole = evaluation["num_examples"] < 1
        if whole:
            del evaluation["num_examples"]
        yield (
            "eval",
            evaluation,
            "eval.num_examples -1: 64 examples (environments may be endless)" if whole else "",
        )


def _place_environments(run: Document, orch: _File) -> None:
    ratios = orch["buffer.env_ratios"]
    for index, env in enumerate(run.value["env"]):
        del env["address"]
        if ratios is not None:
            mark = orch.document.marks[("buffer", "env_ratios")]
            run.put(("env", index, "weight"), ratios[index], mark)


def _put_vllm(run: Document, files: Files) -> None:
    """What the files say of their vLLM, for a run that an override gives to vLLM."""
    infer, orch = files["infer"], files["orch"]
    for key, target in (
        ("tp", "tensor_parallel_size"),
        ("gpu_memory_utilization", "gpu_memory_utilization"),
    ):
        if infer.written(key):
            _put(run, infer, key, f"rollout.vllm.{target}")
    (url,) = orch["client.base_url"]
    if url not in OWN_SERVER:
        mark = orch.document.mark(("client", "base_url"))
        run.put(("rollout", "vllm", "url"), url, mark or Mark(orch.document.name, "client"))


def _refuse_vllm(files: Files, cfg: RunConfig) -> None:
    """ConfigError for what only vLLM does, in a run without it."""
    vllm = cfg.rollout.vllm
    if cfg.rollout.engine == "vllm":
        return
    for asked, section, key in (
        (vllm.tensor_parallel_size > 1, "infer", "tp"),
        (vllm.url is not None, "orch", "client.base_url"),
    ):
        mark = files[section].written(key)
        if asked and mark is not None:
            raise ConfigError(mark.blame("needs vLLM: the override rollout.engine=vllm"))


def _idle_notes(files: Files, cfg: RunConfig) -> Iterator[str]:
    """One line that names what was written and has no effect."""
    keys = [(section, key) for section in SECTIONS for key in IDLE[section]]
    if cfg.rollout.vllm.url is None:
        keys.append(("orch", "client.base_url"))
    idle = [mark for section, key in keys if (mark := files[section].written(key)) is not None]
    if idle:
        yield "no effect in one process: " + ", ".join(
            f"{mark.key} ({mark.where})" for mark in idle
        )
