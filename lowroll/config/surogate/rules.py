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
    """One file: its text with marks, its checked values, and its error messages."""

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
    note or ""."""

    key: str
    value: Any = None
    source: Mark | None = None
    note: str = ""

    @property
    def path(self) -> Path:
        return tuple(self.key.split("."))


def disagreements(files: Files) -> Iterator[str]:
    """Yield the settings on which two files disagree, a line each."""
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
        there = train.mark("lora")
        yield infer.document.marks[("enable_lora",)].blame(
            f"false disagrees with {there.where}: {there.key}: true"
        )
    if not train["lora"] and (adapter := orch.written("model.lora_adapter")) is not None:
        there = train.mark("lora")
        yield adapter.blame(f"disagrees with {there.where}: {there.key}: false")


def settings(files: Files, role: str) -> Iterator[Setting]:
    """Yield every setting that is not copied. role: of a process that has only one file, else ""."""
    yield from _lengths(files)
    yield from _switches(files)
    yield from _precision(files)
    yield from _folders(files)
    yield from _checkpoints(files)
    yield from _evaluation(files["orch"])
    yield from _processes(files, role)


def _lengths(files: Files) -> Iterator[Setting]:
    train, infer, orch = (files[section] for section in SECTIONS)
    whole = orch if orch.written("seq_len") or not train.written("sequence_len") else train
    longest = orch["seq_len"] if whole is orch else train["sequence_len"]
    mark = orch.mark("seq_len") if whole is orch else train.mark("sequence_len")
    row = train if train.written("sequence_len") else whole
    tokens = train["sequence_len"] if row is train else longest
    yield Setting(
        "train.tokens_per_microbatch",
        tokens * train["per_device_train_batch_size"],
        train.mark("sequence_len") if row is train else mark,
    )
    if infer["max_model_len"] is not None and infer["max_model_len"] < longest:
        longest, mark = infer["max_model_len"], infer.mark("max_model_len")
    yield Setting("rollout.max_model_len", longest, mark)
    response = orch["sampling.max_tokens"]
    note = ""
    if response is None:
        response = max(1, longest // 2)
        note = f"sampling.max_tokens is not set: {response}, half of the sequence length"
    yield Setting("rollout.max_tokens", response, orch.mark("sampling.max_tokens"), note)
    limits = [file for file in (orch, train) if file["max_steps"] not in (None, -1)]
    note = "" if limits else "warning: no max_steps in either file: the run stops after 100 steps"
    source = limits[0] if limits else orch
    steps = source["max_steps"] if limits else 100
    yield Setting("train.max_steps", steps, source.mark("max_steps"), note)


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
    base = next((name for name in BASES if train[name]), None)
    if base is not None:
        yield Setting("rollout.weights", BASES[base], train.mark(base))
    else:
        yield Setting(
            "rollout.weights",
            "dense",
            note="rollout.weights: dense, as the files name no format; rollout.weights=int8 asks "
            "for INT8 rollouts",
        )
    if infer["dtype"] == "bfloat16":
        yield Setting("dtype", "bfloat16", infer.mark("dtype"))


def _folders(files: Files) -> Iterator[Setting]:
    train, orch = files["train"], files["orch"]
    inner = not orch.written("output_dir") and train.written("output_dir")
    folder = str(FilePath(train["output_dir"]) / "run_default") if inner else orch["output_dir"]
    mark = train.mark("output_dir") if inner else orch.mark("output_dir")
    yield Setting("output_dir", folder, mark, _elsewhere(train, orch))


def _elsewhere(train: File, orch: File) -> str:
    """Return a note on a run folder that a trainer with train.yaml alone would not find."""
    outer, inner = train.written("output_dir"), orch.written("output_dir")
    parent, run = (os.path.abspath(file["output_dir"]) for file in (train, orch))
    if outer is None or inner is None or parent in (run, os.path.dirname(run)):
        return ""
    return (
        f"warning: the run's folder is {orch['output_dir']} ({inner.where}), which is not in "
        f"{train['output_dir']} ({outer.where}: {outer.key})"
    )


def _checkpoints(files: Files) -> Iterator[Setting]:
    orch = files["orch"]
    missing = orch["ckpt.interval"] is None
    note = "ckpt.interval is not set: 50" if missing else ""
    yield Setting("ckpt.interval", orch["ckpt.interval"], orch.mark("ckpt.interval"), note)
    for name in ("keep_last", "keep_interval"):
        yield Setting(f"ckpt.{name}", orch[f"ckpt.{name}"], orch.mark(f"ckpt.{name}"))


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
    train, infer, orch = (files[section] for section in SECTIONS)
    for key, second, other in (
        ("max_async_level", train, "max_async_level"),
        ("rollout_transport.type", train, "transport_type"),
        ("weight_broadcast.type", infer, "weight_broadcast_type"),
    ):
        target = ORCH[key].to[0]
        if not orch.written(key) and second.written(other):
            yield Setting(target, second[other], second.mark(other))
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
