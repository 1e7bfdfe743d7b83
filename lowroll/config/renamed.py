"""Renamed and removed keys of the configuration.

An old name works for one version, in files, overrides and run folders, with a note; then its row is
removed. Old and new together are refused, because one of them would be ignored. A key that became a
constant is dropped with a note while it has the constant's value, as in earlier run folders;
another value is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from lowroll.config.document import ConfigError, Document, Mark, Path

# old key -> new key
RENAMED: dict[str, str] = {"rollout.bulk": "rollout.large_batch_weights"}


class Gone(NamedTuple):
    """The replacement of a key, and the one value that means the same; None: every value."""

    instead: str
    value: Any = None


# old key -> its replacement
GONE: dict[str, Gone] = {
    "rollout.parts": Gone("with rollout.exact any number of engines draws the same bits"),
    "rollout.vllm.start_deadline": Gone("a server has 600 seconds to answer", 600),
    "rollout.vllm.request_deadline": Gone("client.timeout is that of every engine", 1200),
    "rollout.vllm.max_concurrent": Gone("256 requests are under way together", 256),
    "guard.factor": Gone("tighten draws the bounds to the power 0.5", 0.5),
    "guard.fallback": Gone("each format names the next one", "next"),
}


def carry_over(document: Document) -> list[str]:
    """Rename old keys and drop removed ones; return a note for each. ConfigError names both when
    both are given, and a removed key with another value."""
    notes = []
    for old, gone in GONE.items():
        if not _stands(document.value, _path(old)):
            continue
        mark = document.marks.get(_path(old)) or Mark(document.name, old)
        if document.drop(_path(old)) != gone.value and gone.value is not None:
            raise ConfigError(
                mark.blame(f"the key is gone, and only {gone.value} works: {gone.instead}")
            )
        notes.append(mark.blame(f"the key is gone, and ignored: {gone.instead}"))
    for old, new in RENAMED.items():
        before = _path(old)
        now = _path(new)
        if not _stands(document.value, before):
            continue
        mark = document.marks.get(before) or Mark(document.name, old)
        if _stands(document.value, now):
            raise ConfigError(mark.blame(_twice(new)))
        document.move(before, now, mark)
        notes.append(mark.blame(_note(new)))
    return notes


def renamed_overrides(pairs: list[tuple[str, Any]]) -> Iterator[tuple[str, Any, str, str]]:
    """Yield overrides by new names: (key, value, the key as it was written, a note or "").
    ConfigError names both when an old and a new name are given."""
    written: dict[str, str] = {}
    for key, value in pairs:
        now = _now(key)
        first = written.setdefault(now, key)
        if first != key:
            old, new = sorted((first, key), key=lambda name: name == now)
            raise ConfigError(Mark("override", old).blame(_twice(new)))
        yield now, value, key, "" if now == key else Mark("override", key).blame(_note(now))


def renamed_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an earlier version by new names."""
    document = Document(deepcopy(tree))
    carry_over(document)
    return document.value


def _now(key: str) -> str:
    """Return the new name of a dotted key, which may lie beneath a renamed one."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key


def _path(key: str) -> Path:
    return tuple(key.split("."))


def _stands(value: Any, path: Path) -> bool:
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def _note(new: str) -> str:
    return f"its name is {new} now; the old one works in this version, and not in the next"


def _twice(new: str) -> str:
    return f"is the old name of {new}, which is given too; give one of them"
