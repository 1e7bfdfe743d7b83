"""The conversion of keys of the three files that are not copied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel

from lowroll.config.document import Document, Mark, Path
from lowroll.config.surogate.schema import BASES
from lowroll.config.surogate.table import ORCH, REPEATED, SECTIONS

OWN_SERVER = "http://localhost:8000/v1"  # the document's default: the run's own engine


@dataclass
class File:
    """A file with its marks and checked values."""

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

    def mark(self, key: str) -> Mark:
        """Return the mark of a written or missing key."""
        return self.written(key) or Mark(self.document.name, f"{key} (default)")


Files = dict[str, File]


@dataclass(frozen=True)
class Setting:
    """A setting of the run: its source key (None: a rule), its value (None: the default), and a
    note."""

    key: str
    value: Any = None
    source: Mark | None = None
    note: str = ""

    @property
    def path(self) -> Path:
        return tuple(self.key.split("."))


def disagreements(files: Files) -> Iterator[str]:
    """Yield a line for each disagreement of two files."""
    for places in REPEATED:
        yield from _different_values(files, places)
    train, infer, orch = (files[section] for section in SECTIONS)
    for smaller_file, smaller_key, larger_file, larger_key in (
        (train, "lora_rank", infer, "max_lora_rank"),
        (orch, "seq_len", train, "sequence_len"),
        (orch, "sampling.max_tokens", infer, "max_model_len"),
    ):
        smaller_mark = smaller_file.written(smaller_key)
        larger_mark = larger_file.written(larger_key)
        if smaller_mark is None or larger_mark is None:
            continue
        smaller, larger = smaller_file[smaller_key], larger_file[larger_key]
        if smaller is not None and larger is not None and larger < smaller:
            yield larger_mark.blame(
                f"{larger} is less than {smaller_mark.where}: {smaller_mark.key}: {smaller}"
            )
    lora_mark = train.mark("lora")
    if train["lora"] and not infer["enable_lora"]:
        yield infer.document.marks[("enable_lora",)].blame(
            f"false disagrees with {lora_mark.where}: {lora_mark.key}: true"
        )
    adapter_mark = orch.written("model.lora_adapter")
    if adapter_mark is not None and not train["lora"]:
        yield adapter_mark.blame(f"disagrees with {lora_mark.where}: {lora_mark.key}: false")


def _different_values(files: Files, places: tuple[tuple[str, str], ...]) -> Iterator[str]:
    """Yield a line for each place (section, key) whose value differs from the first. Unwritten
    places, null and -1 have none."""
    values = [
        (mark, files[section][key])
        for section, key in places
        if (mark := files[section].written(key)) and files[section][key] not in (None, -1)
    ]
    for mark, value in values[1:]:
        first_mark, first_value = values[0]
        if value != first_value:
            yield mark.blame(
                f"{value} disagrees with {first_mark.where}: {first_mark.key}: {first_value}"
            )


def settings(files: Files, role: str) -> Iterator[Setting]:
    """Yield every setting that is not copied. role: of a process with only one file, else ""."""
    yield from _lengths(files)
    yield _steps(files)
    yield from _switches(files)
    yield from _precision(files)
    yield from _folders(files)
    yield from _checkpoints(files)
    yield from _evaluation(files["orch"])
    yield from _processes(files, role)


def _lengths(files: Files) -> Iterator[Setting]:
    """Yield the token limits. The trainer's and the orchestrator's lengths stand for each other."""
    train, infer, orch = (files[section] for section in SECTIONS)
    row = (train, "sequence_len") if train.written("sequence_len") else (orch, "seq_len")
    longest_of = (orch, "seq_len") if orch.written("seq_len") else row
    row_file, row_key = row
    row_tokens = row_file[row_key] * train["per_device_train_batch_size"]
    yield Setting("train.tokens_per_microbatch", row_tokens, row_file.mark(row_key))
    file, key = longest_of
    if infer["max_model_len"] is not None and infer["max_model_len"] < file[key]:
        file, key = infer, "max_model_len"  # the engine's limit holds for all sequences
    longest = file[key]
    yield Setting("rollout.max_model_len", longest, file.mark(key))
    max_tokens, note = orch["sampling.max_tokens"], ""
    if max_tokens is None:
        max_tokens = max(1, longest // 2)
        note = f"sampling.max_tokens is not set: {max_tokens}, half of the sequence length"
    yield Setting("rollout.max_tokens", max_tokens, orch.mark("sampling.max_tokens"), note)


def _steps(files: Files) -> Setting:
    for file in (files["orch"], files["train"]):
        if file["max_steps"] not in (None, -1):
            return Setting("train.max_steps", file["max_steps"], file.mark("max_steps"))
    note = "warning: no max_steps in either file: the run stops after 100 steps"
    return Setting("train.max_steps", 100, files["orch"].mark("max_steps"), note)


def _switches(files: Files) -> Iterator[Setting]:
    train, orch = files["train"], files["orch"]
    yield Setting("algorithm", "grpo_no_std")
    if orch["advantage.type"] == "custom":
        for name in ("import_path", "kwargs"):
            key = f"advantage.{name}"
            yield Setting(f"advantage_function.{name}", orch[key], orch.mark(key))
    elif orch["advantage.length_weighted_mean"]:
        yield Setting("advantage", "length_weighted", orch.mark("advantage.length_weighted_mean"))
    yield Setting("loss.reduce", "token-mean")
    yield Setting(
        "correction",
        "aipo",
        note="correction: aipo, because the files' token loss is AIPO's with masks (loss.aipo)",
    )
    if train["optimizer"] == "adamw_8bit" and train.written("optimizer"):
        yield Setting("train.optimizer", "adamw8bit", train.mark("optimizer"))
    if orch["ckpt.skip_progress"]:
        yield Setting(
            "ckpt.skip_progress",
            note="warning: ckpt.skip_progress: a resumed run begins anew with the weights of its "
            "checkpoint, and learns from prompts a second time",
        )


def _precision(files: Files) -> Iterator[Setting]:
    train, infer = files["train"], files["infer"]
    dense = Setting(
        "rollout.weights",
        "dense",
        note="rollout.weights: dense, as the files name no format; rollout.weights=int8 asks for "
        "INT8 rollouts",
    )
    bases = [Setting("rollout.weights", BASES[n], train.mark(n)) for n in BASES if train[n]]
    yield bases[0] if bases else dense
    if infer["dtype"] == "bfloat16":
        yield Setting("dtype", "bfloat16", infer.mark("dtype"))


def _folders(files: Files) -> Iterator[Setting]:
    train, orch = files["train"], files["orch"]
    folder, mark = orch["output_dir"], orch.mark("output_dir")
    if train.written("output_dir") and not orch.written("output_dir"):
        folder = str(FilePath(train["output_dir"]) / "run_default")
        mark = train.mark("output_dir")
    yield Setting("output_dir", folder, mark, _unreachable_folder_note(train, orch))


def _unreachable_folder_note(train: File, orch: File) -> str:
    train_mark, orch_mark = train.written("output_dir"), orch.written("output_dir")
    if train_mark is None or orch_mark is None:
        return ""
    outer_folder, run_folder = (os.path.abspath(file["output_dir"]) for file in (train, orch))
    if outer_folder in (run_folder, os.path.dirname(run_folder)):
        return ""
    return (
        f"warning: the run's folder is {orch['output_dir']} ({orch_mark.where}), which is not in "
        f"{train['output_dir']} ({train_mark.where}: {train_mark.key})"
    )


def _checkpoints(files: Files) -> Iterator[Setting]:
    orch = files["orch"]
    for key in ("ckpt.interval", "ckpt.keep_last", "ckpt.keep_interval"):
        yield Setting(key, orch[key], orch.mark(key))
    if orch["ckpt.interval"] is None:
        yield Setting("ckpt.interval", note="ckpt.interval is not set: 50")


def _evaluation(orch: File) -> Iterator[Setting]:
    if orch["eval"] is None:
        return
    evaluation = dict(orch["eval"])
    evaluation["env"] = [
        {key: value for key, value in env.items() if key != "address"} for env in evaluation["env"]
    ]
    if evaluation["num_examples"] < 1:
        evaluation["num_examples"] = None
    yield Setting("eval", evaluation, orch.mark("eval"))


def _processes(files: Files, role: str) -> Iterator[Setting]:
    """Yield the connections of the roles. Another file may have the value of a missing key of
    orch.yaml."""
    train, infer, orch = (files[section] for section in SECTIONS)
    for key, other_file, other_key in (
        ("max_async_level", train, "max_async_level"),
        ("rollout_transport.type", train, "transport_type"),
        ("weight_broadcast.type", infer, "weight_broadcast_type"),
    ):
        target = ORCH[key].to[0]
        if not orch.written(key) and other_file.written(other_key):
            yield Setting(target, other_file[other_key], other_file.mark(other_key))
        else:
            yield Setting(target, orch[key], orch.mark(key))
    for key in ("host", "port"):
        yield Setting(f"serve.{key}", infer[key], infer.mark(key))
    urls = orch["client.base_url"]
    if role == "orchestrate":
        addresses = [] if orch["client.elastic.hostname"] is not None else urls
        yield Setting("client.base_url", addresses, orch.mark("client.base_url"))
    elif urls != [OWN_SERVER]:
        yield Setting("client.base_url", urls, orch.mark("client.base_url"))
