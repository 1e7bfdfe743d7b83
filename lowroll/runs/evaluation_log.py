"""The responses of an evaluation on disk, from which a killed evaluation continues.

    {"kind": "asked", ...}         the settings, which must be the same when the file is reopened
    {"kind": "drawn", "id", ...}   the responses to one example
    {"kind": "scored", "id", ...}  their scores

Each line has a checksum seeded with its number (`checkpoint.line_checksum`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowroll.checkpoint.atomic_files import append_line, write_file
from lowroll.checkpoint.line_checksum import read_objects, seal
from lowroll.orchestrator.examples import Example, ExampleResponse
from lowroll.orchestrator.prompt_source import PromptDraw
from lowroll.types import Prompt, Score, ScoreError

_UNKNOWN_PROMPT = Prompt("", "", [])  # until its draw is known
_LINE_KEYS = ("kind", "crc")


class Responses:
    """The examples of one set and engine; in memory without a path. ValueError names the first
    setting that differs from the file's."""

    def __init__(self, path: Path | None, asked: Mapping[str, Any]) -> None:
        self.path, self.examples = path, dict[str, Example]()
        self._prompts: dict[str, str] = {}
        self._lines = 0
        if path is None:
            return
        if path.exists():
            self._read(path, json.loads(json.dumps(dict(asked))))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
        if not self._lines:
            self._append([{"kind": "asked", **asked}])

    def missing(self, draws: Sequence[PromptDraw]) -> list[PromptDraw]:
        """Return the draws without responses, and give the other examples their prompts. ValueError
        for a different prompt."""
        missing = []
        for draw in draws:
            id, prompt_digest = draw.request.id, _prompt_digest(draw)
            if self._prompts.setdefault(id, prompt_digest) != prompt_digest:
                raise ValueError(
                    f"{self.path}: {id} was asked with another prompt: the data, the template or "
                    "the tokenizer has changed; name another folder by --out"
                )
            if id in self.examples:
                self.examples[id].prompt = draw.prompt
            else:
                missing.append(draw)
        return missing

    def of(self, draws: Sequence[PromptDraw]) -> list[Example]:
        return [self.examples[draw.request.id] for draw in draws]

    def keep_drawn(self, examples: Sequence[Example]) -> None:
        self.examples |= {example.id: example for example in examples}
        self._append(
            {
                "kind": "drawn",
                "id": example.id,
                "prompt": self._prompts[example.id],
                "messages": example.prompt.messages,
                "responses": [
                    {
                        field: value
                        for field, value in vars(response).items()
                        if field != "score" and value is not None
                    }
                    for response in example.responses
                ],
            }
            for example in examples
        )

    def keep_scored(self, examples: Sequence[Example]) -> None:
        self._append(
            {
                "kind": "scored",
                "id": example.id,
                "scores": [_score_fields(response.score) for response in example.responses],
            }
            for example in examples
        )

    def _append(self, objects: Iterable[Mapping[str, Any]]) -> None:
        if self.path is None:
            return
        lines = [json.dumps(fields).encode() for fields in objects]
        sealed_lines = [seal(line, self._lines + number) for number, line in enumerate(lines, 1)]
        if sealed_lines:
            append_line(self.path, b"\n".join(sealed_lines))
            self._lines += len(sealed_lines)

    def _read(self, path: Path, asked: dict[str, Any]) -> None:
        entries = _read_complete_lines(path)
        self._lines = len(entries)
        for number, entry in enumerate(entries, 1):
            is_first, has_settings = number == 1, entry.get("kind") == "asked"
            if is_first != has_settings:
                raise ValueError(f"{path}:{number}: no responses of lowroll eval")
            if has_settings:
                _refuse_other_settings(path, entry, asked)
            else:
                self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        id = entry["id"]
        if entry["kind"] == "drawn":
            responses = [ExampleResponse(**fields) for fields in entry["responses"]]
            self._prompts[id] = entry["prompt"]
            self.examples[id] = Example(id, _UNKNOWN_PROMPT, responses)
            return
        responses = self.examples[id].responses
        for response, score_fields in zip(responses, entry["scores"], strict=True):
            score_class = ScoreError if "kind" in score_fields else Score
            response.score = score_class(**score_fields)


def _read_complete_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file's lines, and remove a torn last line. ValueError for other
    damage."""
    data = path.read_bytes()
    is_torn = not data.endswith(b"\n")
    objects, problems = read_objects(path) if data else ([], [])
    if len(problems) > is_torn:  # a torn last line may be one problem
        raise ValueError(f"{problems[0]}; remove the file to draw its responses again")
    if is_torn:
        complete_lines = data[: data.rfind(b"\n") + 1]
        objects = objects[: complete_lines.count(b"\n")]
        write_file(path, complete_lines)
    return objects


def _refuse_other_settings(path: Path, found: dict[str, Any], asked: dict[str, Any]) -> None:
    for key in {**asked, **found}:
        if key not in _LINE_KEYS and found.get(key) != asked.get(key):
            raise ValueError(
                f"{path}: was drawn with {key} {json.dumps(found.get(key))}, and this asks "
                f"for {json.dumps(asked.get(key))}; name another folder by --out"
            )


def _score_fields(score: Score | ScoreError | None) -> dict[str, Any]:
    assert score is not None
    return {key: value for key, value in vars(score).items() if value is not None}


def _prompt_digest(draw: PromptDraw) -> str:
    return hashlib.sha256(
        json.dumps([draw.request.prompt_ids, draw.request.n]).encode()
    ).hexdigest()[:16]
