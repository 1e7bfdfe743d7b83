"""Renamed and removed keys of the configuration.

An old name works for one version, with a note. A key that became a constant is dropped with a note,
unless it has another value.
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


GONE: dict[str, Gone] = {
    "rollout.parts": Gone("with rollout.exact any number of engines draws the same bits"),
    "rollout.vllm.start_deadline": Gone("a server has 600 seconds to answer", 600),
    "rollout.vllm.request_deadline": Gone("client.timeout is that of every engine", 1200),
    "rollout.vllm.max_concurrent": Gone("256 requests are under way together", 256),
    "guard.factor": Gone("tighten draws the bounds to the power 0.5", 0.5),
    "guard.fallback": Gone("each format names the next one", "next"),
}


def carry_over(document: Document) -> list[str]:
    """Rename old keys and drop removed ones in the document; return a note for each.

    ConfigError for an old key beside its new one, and for a removed key with another value.
    """
    notes = []
    for old in (*GONE, *RENAMED):
        old_path = _key_path(old)
        if not _is_present(document.value, old_path):
            continue
        mark = document.marks.get(old_path) or Mark(document.name, old)
        if old in GONE:
            instead, constant = GONE[old]
            if document.drop(old_path) != constant and constant is not None:
                raise ConfigError(
                    mark.blame(f"the key is gone, and only {constant} works: {instead}")
                )
            notes.append(mark.blame(f"the key is gone, and ignored: {instead}"))
            continue
        new = RENAMED[old]
        if _is_present(document.value, _key_path(new)):
            raise ConfigError(mark.blame(_given_twice_message(new)))
        document.move(old_path, _key_path(new), mark)
        notes.append(mark.blame(rename_note(new)))
    return notes


def renamed_overrides(pairs: list[tuple[str, Any]]) -> Iterator[tuple[str, Any, Mark]]:
    """Yield (key, value, mark of the written key) by the new names. ConfigError when two keys name
    the same setting."""
    written_keys: dict[str, str] = {}
    for written_key, value in pairs:
        key = _current_name(written_key)
        first_key = written_keys.setdefault(key, written_key)
        if first_key != written_key:
            old, new = (written_key, first_key) if first_key == key else (first_key, written_key)
            raise ConfigError(Mark("override", old).blame(_given_twice_message(new)))
        yield key, value, Mark("override", written_key)


def renamed_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an earlier version by new names."""
    document = Document(deepcopy(tree))
    carry_over(document)
    return document.value


def _current_name(key: str) -> str:
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key


def _key_path(key: str) -> Path:
    return tuple(key.split("."))


def _is_present(value: Any, path: Path) -> bool:
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def rename_note(new: str) -> str:
    return f"its name is {new} now; the old one works in this version, and not in the next"


def _given_twice_message(new: str) -> str:
    return f"is the old name of {new}, which is given too; give one of them"
