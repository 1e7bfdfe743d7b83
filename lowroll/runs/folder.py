"""The folder of a run: its files, and how a run begins, continues and is saved.

    config.yaml     the settings; its first line names the command of the run
    about.json, metrics.jsonl, rollouts/, offending/, checkpoints/, final/, logs/, environments/, .lock, report.html
    rollout_weights.json    of a run whose rollout.weights is a budget

Only a run's own files are replaced: by name beside a run's config.yaml, checkpoints and final/ by
their manifests. Anything in the way is refused at the start.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lowroll.checkpoint.atomic_files import write_file
from lowroll.checkpoint.atomic_folders import read_meta
from lowroll.checkpoint.disk_space import Space
from lowroll.checkpoint.folder_swap import (
    foreign_in,
    remove_published,
    replace_folder,
    settle_folder,
)
from lowroll.checkpoint.lock import LOCK
from lowroll.checkpoint.store import DAMAGED, Store
from lowroll.config import RunConfig
from lowroll.metrics.page import REPORT_FILE, is_report
from lowroll.metrics.record import (
    ABOUT_FILE,
    METRICS_FILE,
    Record,
    Recorder,
    computed_otherwise,
    write_about,
)
from lowroll.metrics.trackers import TRACKED_FILE, Tracked, Trackers
from lowroll.runs import identity
from lowroll.transport.rollout_log import (
    is_rollouts,
    rollout_files,
    truncate_rollouts,
    without_evictions,
    write_rollouts,
)
from lowroll.types import Batch

log = logging.getLogger(__name__)

CONFIG, FINAL, LOGS, ENVIRONMENTS = "config.yaml", "final", "logs", "environments"
WEIGHTS = "rollout_weights.json"  # formats by layer (`runs.chosen_formats`)
BATCHES = ("rollouts", "offending")
ROLES = ("roles", "orchestrator", "broadcasts")  # of a run with roles
_FIRST_LINE = re.compile(r"# lowroll (\w+): the settings of the run in this folder\n")
_SPOOL_FILE = re.compile(r"step_[0-9]{6,15}\.frame(\.damaged)?|(end|cursor|dismissed)\.json")
_STEP_FOLDER = re.compile(r"step_[0-9]{6,}")


def resumes_by_config(cfg: RunConfig) -> bool:
    resume_step = cfg.ckpt.resume_step
    return resume_step is not None and (
        resume_step >= 0 or RunFolder(cfg, "grpo").made_by() is not None
    )


class RunFolder:
    """`output_dir` of a configuration. alone: False for a run with roles, whose orchestrator writes
    the rollouts (`runs.roles`)."""

    verified = False  # the requested checkpoint was just verified

    def __init__(self, cfg: RunConfig, command: str, alone: bool = True) -> None:
        self.alone = alone
        self.attempt = 0  # of this launch
        self.cfg = cfg
        self.command = command
        self.path = Path(cfg.output_dir)
        self.final = self.path / FINAL
        self.store = Store(self.path / "checkpoints", cfg.ckpt.keep_last, cfg.ckpt.keep_interval)
        self.space = Space(cfg.ckpt.wait_for_space)
        self.recorder: Recorder
        self.published = False  # final/ is of this attempt
        self.trackers: Trackers | None = None
        # None is the newest. A restarted role resumes where it was.
        resume_step = cfg.ckpt.resume_step
        self.asked_step = None if resume_step == -1 or not alone else resume_step

    @cached_property
    def _settings(self) -> str:
        return self.cfg.dump()

    # -- whose it is -------------------------------------------------------------------------------

    def made_by(self) -> str | None:
        """Return the command of the run here, if any."""
        config_path = self.path / CONFIG
        if config_path.is_file():
            with config_path.open(encoding="utf-8", errors="replace") as file:
                if first_line := _FIRST_LINE.fullmatch(file.readline(200)):
                    return first_line[1]
        for step in self.store.steps():
            meta = read_meta(self.store.path(step)) or {}
            if "config" in meta:
                return str(meta.get("command", "grpo"))
        return None

    def has_steps(self) -> bool:
        """Return whether the run here has made a step or ended."""
        metrics = self.path / METRICS_FILE
        return (
            bool(self.store.steps())
            or (self.store.folder / DAMAGED).is_dir()
            or read_meta(self.final) is not None
            or (metrics.is_file() and b"\n" in metrics.read_bytes())
            or any(step > 1 for name in BATCHES for step, _ in rollout_files(self.path / name))
        )

    def check(self, resume: bool = False, overwrite: bool = False) -> None:
        """Raise ValueError naming what makes the folder unusable; change nothing."""
        _check_writable(self.path)
        command = self.made_by()
        if resume:
            self._check_resumable(command)
        elif command is not None and not overwrite and self.has_steps():
            raise ValueError(
                f"output_dir: {self.path} already holds a run; continue it with --resume, replace "
                "it with --overwrite, or name another folder"
            )
        obstacle = next(self._obstacles(command, overwrite), None)
        if obstacle is not None:
            raise ValueError(
                f"output_dir: {obstacle}. A run would write there: move it, or name another folder"
            )
        if not resume:
            removed_paths = (self.store.folder, self.final, *(self.path / name for name in BATCHES))
            identity.refuse_to_remove(removed_paths, self.cfg)

    def _check_resumable(self, command: str | None) -> None:
        if command is None and not (self.path / LOCK).exists():
            raise ValueError(f"output_dir: {self.path} holds no run to resume")
        if command not in (None, self.command):
            raise ValueError(
                f"output_dir: {self.path} holds a run of lowroll {command}: resume it with that "
                f"command"
            )

    def _obstacles(self, command: str | None, overwrite: bool) -> Iterator[str]:
        """Describe each thing that a run would overwrite although no run made it."""
        for name in (self.store.folder.name, LOGS, ENVIRONMENTS, *BATCHES):
            path = self.path / name
            if os.path.lexists(path) and not path.is_dir():
                yield f"{path} is not a folder"
        batch_files = [path for name in BATCHES for _, path in rollout_files(self.path / name)]
        if command is None:
            paths = [self.path / name for name in (CONFIG, ABOUT_FILE, METRICS_FILE, FINAL)]
            existing = [path for path in paths if os.path.lexists(path)]
            for path in existing + batch_files:
                yield f"{path} is not of a run of this folder"
        elif os.path.lexists(self.final) and (foreign_file := foreign_in(self.final)):
            yield foreign_file
        if command is not None and overwrite:
            for path in batch_files:
                if not is_rollouts(path):
                    yield f"{path} does not begin as rollouts do"
        for path in sorted(self.store.folder.glob("step_*")):
            if not _STEP_FOLDER.fullmatch(path.name):
                continue
            if command is None or not path.is_dir() or path.is_symlink():
                yield f"{path} is not a checkpoint of a run of this folder"
            elif overwrite and (foreign_file := foreign_in(path, contents=False)):
                yield foreign_file

    # -- beginning and going on --------------------------------------------------------------------

    def settle(self) -> None:
        """Finish a dead attempt's replacement or removal."""
        settle_folder(self.final)
        self.store.clean()

    def keep(self, texts: Mapping[Path, str]) -> None:
        """Write environments' files that do not exist yet."""
        for path, text in texts.items():
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                self.space.write(path, partial(write_file, path, text.encode()))

    def begin(self, about: Mapping[str, str], again: bool = False) -> None:
        """Remove an earlier run's files, then describe this one. again: roles began before, and
        without a checkpoint their batches stay."""
        if again and not self.alone:
            Recorder(self.path).truncate(0)
        else:
            self._clear()
            self._clear_roles()
        self._write_config()
        self.space.write(
            self.path / ABOUT_FILE,
            lambda: write_about(self.path, {"command": self.command, **about}),
        )
        for name, description in about.items():
            log.info("%s: %s", name, description)
        self.recorder = Recorder(self.path)
        self._track(0)

    def resume(self, step: int, about: Mapping[str, str]) -> None:
        """Truncate the folder to a step's checkpoint, and apply the current settings."""
        for difference in computed_otherwise(self.path, about):
            log.warning(
                "resumed elsewhere, so not bit for bit as the run would have gone on: %s",
                difference,
            )
        self.recorder = Recorder(self.path)
        if self.alone:
            self._clear_roles()  # the checkpoint holds the orchestrator's state

        def truncate() -> None:
            self.recorder.truncate(step)
            if self.alone:
                truncate_rollouts(self.path / "rollouts", step)
            self.store.truncate(step)

        self.space.write(self.path, truncate)
        self._write_config()
        self._track(step)

    def record(self, step: int, metrics: Mapping[str, float]) -> Record:
        record = self.space.write(self.recorder.path, lambda: self.recorder.write(step, metrics))
        if self.trackers is not None:
            self.trackers.log(step, record)
        return record

    def close(self) -> None:
        if self.trackers is not None:
            self.trackers.close()

    def _track(self, step: int) -> None:
        tracked_run = Tracked(self.path, self.cfg.track_project, self.cfg.tree(), step)
        self.trackers = Trackers(self.cfg.track, tracked_run)

    def keep_batch(self, name: str, batch: Batch) -> Path:
        """Write a batch into one of BATCHES; return its file. `rollouts` omit evictions."""
        folder = self.path / name
        if name == "rollouts":
            batch = without_evictions(batch)
        return self.space.write(folder, lambda: write_rollouts(folder, batch))

    def save(
        self,
        step: int,
        tensors: dict[str, dict[str, Any]],
        state: dict[str, Any],
        meta: dict[str, Any],
        parts: int = 1,
        share: Callable[[Path], object] | None = None,
    ) -> None:
        """Save a checkpoint with settings and command. parts, share: as `Store.save`."""
        meta = {"config": self._settings, "command": self.command, **meta}
        self.space.write(
            self.store.path(step),
            lambda: self.store.save(step, tensors, state, meta, parts, share),
        )

    def publish(self, write: Callable[[Path], object]) -> None:
        """Replace final/ by the folder that `write(path)` publishes."""
        self.space.write(self.final, lambda: replace_folder(self.final, write))
        self.published = True

    def _write_config(self) -> None:
        first_line = f"# lowroll {self.command}: the settings of the run in this folder\n"
        assert _FIRST_LINE.fullmatch(first_line)
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / CONFIG
        self.space.write(path, lambda: write_file(path, (first_line + self._settings).encode()))

    def _clear_roles(self) -> None:
        orchestrator = self.path / "orchestrator"
        for path in _entries(orchestrator / "spool"):
            if _SPOOL_FILE.fullmatch(path.name):
                path.unlink(missing_ok=True)
        if not self.alone or not self.store.steps():
            for name in ("evaluations.jsonl", "ledger.jsonl"):
                (orchestrator / name).unlink(missing_ok=True)
        broadcasts = self.path / "broadcasts"
        for path in _entries(broadcasts):
            if (read_meta(path) or {}).get("broadcast") is not None:
                (path / "STABLE").unlink(missing_ok=True)
                remove_published(path, broadcasts)

    def _clear(self) -> None:
        if self.made_by() is None:
            return
        # Checkpoints go first, so that a run with a checkpoint has all its files.
        self.store.truncate(-1)
        damaged = self.store.folder / DAMAGED
        for path in _entries(damaged):
            _remove_if_published(path, self.store.folder)
        _remove_if_published(self.final, self.path)
        for name in BATCHES:
            truncate_rollouts(self.path / name, -1)
        for name in (METRICS_FILE, ABOUT_FILE, TRACKED_FILE):
            (self.path / name).unlink(missing_ok=True)
        if is_report(self.path / REPORT_FILE):
            (self.path / REPORT_FILE).unlink()
        for folder in (damaged, self.store.folder, *(self.path / name for name in BATCHES)):
            if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
                folder.rmdir()
        foreign_files = sorted(
            path.name
            for path in self.path.iterdir()
            if path.name not in (LOCK, CONFIG, LOGS, ENVIRONMENTS, WEIGHTS, *ROLES)
        )
        if foreign_files:
            log.warning(
                "%s: left as they are, for no run made them: %s",
                self.path,
                ", ".join(foreign_files),
            )


def _entries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from folder.iterdir()


def _remove_if_published(folder: Path, trash: Path) -> None:
    if folder.exists() and not foreign_in(folder, contents=False):
        remove_published(folder, trash)


def _check_writable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir: {folder} is not a folder")
    existing_parent = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    if not existing_parent.is_dir() or not os.access(existing_parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"output_dir: {folder} cannot be written: {existing_parent} is "
            f"{'write-protected' if existing_parent.is_dir() else 'not a folder'}"
        )
