"""The failure page of an evaluation: its table, and the examples that were not always solved.

Responses are untrusted data: every text is escaped and cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowroll.metrics.page import escape, gold_answer, page, transcript

MOST = 100  # examples shown of a set
LONGEST = 8000  # characters of a text
_SUMMARY_LENGTH = 160


@dataclass(frozen=True)
class Attempt:
    """The result of one engine (`name`) on an example, with a wrong response."""

    name: str
    solved: int
    count: int
    wrong: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Failure:
    """An example that some engine did not always solve."""

    id: str
    messages: Sequence[dict[str, Any]]
    info: dict[str, Any]
    attempts: Sequence[Attempt]

    @property
    def parted(self) -> bool:
        return len({attempt.solved / max(1, attempt.count) for attempt in self.attempts}) > 1


def failure_page(
    title: str,
    facts: Sequence[tuple[str, str]],
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    failures: Mapping[str, Sequence[Failure]],
) -> str:
    """Return the document. `failures` by set; those on which engines differ come first."""
    fact_list = "".join(
        f"<dt>{escape(label, 80)}</dt><dd>{escape(value, 400)}</dd>" for label, value in facts
    )
    body = [
        f"<h1>{escape(title, 200)}</h1><p class=sub>held-out examples and how they fail</p>",
        f"<dl>{fact_list}</dl>",
        _table(*table),
        "<p><input id=search type=search placeholder='search the failures' hidden>"
        "<span id=found></span></p>",
        *(_set_section(name, set_failures) for name, set_failures in failures.items()),
    ]
    return page(escape(title, 200), "\n".join(body))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head_cells = "".join(f"<th>{escape(cell, 80)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td class=num>{escape(cell, 200)}</td>" for cell in row) + "</tr>\n"
        for row in rows
    )
    return f"<div class=wide><table><tr>{head_cells}</tr>\n{lines}</table></div>"


def _set_section(name: str, failures: Sequence[Failure]) -> str:
    shown = sorted(failures, key=lambda one: not one.parted)[:MOST]
    num_hidden = len(failures) - len(shown)
    hidden_note = f", {num_hidden} more in the files of responses" if num_hidden else ""
    num_parted = sum(one.parted for one in failures)
    parted_note = f"; engines part on {num_parted}" if num_parted else ""
    label = f"{escape(name, 80)}: {len(failures)} not always solved{parted_note}{hidden_note}"
    return f"<details class=step open><summary>{label}</summary>{''.join(map(_failure_details, shown))}</details>"


def _failure_details(one: Failure) -> str:
    solved_counts = " · ".join(
        f"{result.name} {result.solved}/{result.count}" for result in one.attempts
    )
    scorer_data = {
        key: value for key, value in one.info.items() if key not in ("row", "split", "place")
    }
    question = escape(" ".join(str(one.messages[-1].get("content", "")).split()), _SUMMARY_LENGTH)
    texts = [("asked", transcript(one.messages)), ("gold answer", gold_answer(scorer_data))]
    for attempt in one.attempts:
        if attempt.wrong is not None:
            note = f", {attempt.note}" if attempt.note else ""
            texts.append((f"{attempt.name}{note}", attempt.wrong or "(an empty response)"))
    body = "".join(
        f"\n<h4>{escape(name, 200)}</h4>\n<pre>{escape(text, LONGEST)}</pre>"
        for name, text in texts
    )
    summary = f"<b>{escape(solved_counts, 200)}</b><i>{escape(one.id, 80)}</i>{question}"
    return f"<details class=sample><summary>{summary}</summary>{body}</details>\n"
