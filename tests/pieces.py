"""Drop-one-state: is every piece of a checkpoint needed, and noticed when it is missing?

A run of three steps gives the truth: what the third step records, and the state after it. Then the
checkpoint of the second step is taken apart. Every key of its state, and tensors of its files, are
removed, and set to what a fresh run would have, one at a time; the run goes on from what is left,
and must refuse it or do the third step otherwise. Which pieces there are is read off the
checkpoint, so a piece that is added later is asked about too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from test_run import settings

import lowroll
from lowroll.checkpoint.store import Checkpoint, Store
from lowroll.config import from_mapping
from lowroll.metrics.record import reproducible
from lowroll.runs.folder import RunFolder
from lowroll.runs.grpo import Run

Path_ = tuple[str, ...]
# What matters when further updates fail or more steps alarm (tests/test_optim.py,
# tests/test_guard.py): one quiet step shows only that it comes back.
SHOWN_AT_ONCE = ("refused_in_a_row", "guard.streak", "guard.average")


def configurations(model: Path, out: Path) -> dict[str, dict[str, Any]]:
    """Two runs that between them have every kind of piece."""
    short = {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "minibatches": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    guard = {"action": "tighten", "ratio_above": 1.0001, "patience": 2}
    critic = settings(
        model,
        out / "critic",
        algorithm="ppo",
        guard=guard,
        loss={"kl_coef": 0.01},
        force=True,
        train={**short, "uaq_scale": 1.5},
        stages=[{"step": 2, "max_tokens": 7}],
    )
    adapter = settings(
        model,
        out / "adapter",
        dtype="bfloat16",
        algorithm="dapo",
        force=True,
        dapo={"max_rounds": 2, "no_signal": "go_on"},
        train={**short, "lora": True, "lora_rank": 3, "optimizer": "muon"},
    )
    return {"critic": critic, "adapter": adapter}


class Trial:
    """One run that can go on from any version of its checkpoint of step 2."""

    def __init__(self, tree: dict[str, Any], stack: ExitStack) -> None:
        lowroll.run(from_mapping(tree))
        self.cfg = from_mapping(tree).resolved()
        self.store = Store(Path(tree["output_dir"]) / "checkpoints")
        self.saved = self.store.load(2)
        self.store.truncate(2)
        self.stack = stack
        self.run = Run(RunFolder(self.cfg, "grpo"), stack, resume=True)
        self.truth = self.outcome(self.saved)
        again = self.outcome(self.saved)
        assert again == self.truth, "going on from the whole checkpoint does not repeat itself"

    def outcome(self, saved: Checkpoint) -> tuple[str, str, str]:
        """Digests of the state that the checkpoint gives, of the third step's record and of the
        state after it."""
        self.run.checkpoints.found = replace(
            saved, tensors=copy.deepcopy(saved.tensors), state=copy.deepcopy(saved.state)
        )
        self.run.resume()
        before = self.digest()
        record = self.run.step(3)
        self.run.home.store.truncate(2)
        return before, json.dumps(reproducible(record), sort_keys=True), self.digest()

    def digest(self) -> str:
        tensors, trainer = self.run.trainer.state()
        found = hashlib.sha256(
            json.dumps(
                [
                    trainer,
                    self.run.orchestrator.state(),
                    self.run.monitor.widened,
                    self.run.monitor.guard and self.run.monitor.guard.state(),
                ]
            ).encode()
        )
        for file, group in sorted(tensors.items()):
            for name, tensor in sorted(group.items()):
                found.update(f"{file} {name} {tensor.dtype}".encode())
                found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def survivors(self, every_tensor: bool = False) -> Iterator[str]:
        """What is wrong: a piece that nobody misses, or whose loss is not said in words."""
        for what, mutant, removed in mutants(self.saved, every_tensor):
            try:
                after = self.outcome(mutant)
            except ValueError:
                continue
            except Exception as error:
                if removed:
                    yield f"{what}: {type(error).__name__}: {error}"
                continue
            shown = slice(None) if what.endswith(SHOWN_AT_ONCE) else slice(1, None)
            if after[shown] == self.truth[shown]:
                yield f"{what}: nobody noticed"
        assert self.outcome(self.saved) == self.truth, "a mutant has left something behind"

    def meta_survivors(self) -> Iterator[str]:
        """The same of what lies beside the state, which is asked before anything is built."""
        for name in self.saved.meta:
            meta = {key: value for key, value in self.saved.meta.items() if key != name}
            store = Store.load
            try:
                Store.load = lambda *_, meta=meta, **__: replace(self.saved, meta=meta)  # type: ignore[method-assign]
                Run(RunFolder(self.cfg, "grpo"), self.stack, resume=True)
                yield f"meta.{name}: nobody noticed"
            except ValueError:
                continue
            finally:
                Store.load = store  # type: ignore[method-assign]


def mutants(saved: Checkpoint, every_tensor: bool) -> Iterator[tuple[str, Checkpoint, bool]]:
    """(what was done, the checkpoint, whether something was removed)."""
    for path in paths(saved.state):
        yield (
            f"state.{'.'.join(path)} removed",
            replace(saved, state=changed(saved.state, path)),
            True,
        )
        value = inside(saved.state, path)
        if not isinstance(value, dict):
            fresh = replace(saved, state=changed(saved.state, path, reset(value)))
            yield f"state: {reset(value)!r} for {'.'.join(path)}", fresh, False
    for file, group in saved.tensors.items():
        less = {name: tensors for name, tensors in saved.tensors.items() if name != file}
        yield f"tensors.{file} removed", replace(saved, tensors=less), True
        for name in group if every_tensor else representatives(group):
            zero = (
                torch.zeros_like(group[name]) if group[name].any() else torch.ones_like(group[name])
            )
            for what, other, removed in (("removed", {}, True), ("reset", {name: zero}, False)):
                rest = {key: tensor for key, tensor in group.items() if key != name} | other
                yield (
                    f"tensors.{file}.{name} {what}",
                    replace(saved, tensors=saved.tensors | {file: rest}),
                    removed,
                )


def representatives(group: Mapping[str, torch.Tensor]) -> list[str]:
    """One matrix of each kind of tensor: parameters, moments, masters."""
    kinds = {
        name.rpartition(".")[2]
        if re.search(r"\.(exp_avg|exp_avg_sq|momentum|master)$", name)
        else "": name
        for name in sorted(group, key=lambda name: group[name].ndim)
    }
    return list(kinds.values())


def paths(tree: Mapping[str, Any], above: Path_ = ()) -> Iterator[Path_]:
    for name, value in tree.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths(value, (*above, name))


def inside(tree: Any, path: Path_) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def changed(tree: Mapping[str, Any], path: Path_, *value: Any) -> dict[str, Any]:
    """The tree with another value at a path, or without it."""
    tree = copy.deepcopy(dict(tree))
    at = inside(tree, path[:-1])
    del at[path[-1]]
    if value:
        at[path[-1]] = value[0]
    return tree


def reset(value: Any) -> Any:
    """What a fresh run would have, or another value where it has this one."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return type(value)(0) if value else type(value)(1)
    return type(value)() if value else "1" if isinstance(value, str) else [1]
