"""Sides that take turns with the same prompts, and the rows that come of it.

Ours is one side; the others are vLLM's settings (`bench.rivals`). Every side runs in the warm-up and
in the first round; of a family of settings the fastest of that round goes on. A ratio is held against
that one, and its name stands in the row.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench import roofline, targets
from bench.harness import Row, less_row, say, seconds_of, speed_row
from bench.rivals import fastest
from bench.roofline import step_bytes
from bench.shapes import SHAPES
from bench.work import PLAIN, Work
from lowroll import Engine, Group, Request

OURS = "ours"
OWN_PLAIN = "ours, plain"
WARM_UP = 32  # tokens
FIRST_ROUNDS = 5  # for each of the others: a call of one token takes milliseconds
Generate = Callable[[list[list[int]], int, int, Mapping[str, Any]], float]


@dataclass
class Ours:
    engine: Engine
    groups: list[Group] = field(default_factory=list)  # of the last call

    def generate(
        self, prompts: list[list[int]], copies: int, new_tokens: int, asked: Mapping[str, Any]
    ) -> float:
        """Return the seconds of one call. asked: fields of the requests."""
        requests = [Request(ids, n=copies, seed=7, **asked) for ids in prompts]
        seconds = seconds_of(lambda: self._draw(requests), self.engine.model.device)
        made = {len(rollout.logprobs) for group in self.groups for rollout in group.rollouts}
        assert made == {new_tokens}, f"the engine made {made} tokens instead of {new_tokens}"
        return seconds

    def _draw(self, requests: list[Request]) -> None:
        self.groups = self.engine.generate(requests)

    def run(self, work: Work, seed: int) -> float:
        prompts = work.prompts(self.engine.spec.vocab_size, seed)
        return self.generate(prompts, work.copies, work.new_tokens, work.asked(work.new_tokens))

    @property
    def sequences(self) -> list[list[int]]:
        """Return prompt and response of every rollout of the last call."""
        return [
            group.request.prompt_ids + rollout.token_ids
            for group in self.groups
            for rollout in group.rollouts
        ]


@dataclass(frozen=True)
class Side:
    """A side that takes turns.

    family: its family, of which only the fastest goes on; plain: it draws without filters.
    """

    generate: Generate
    family: str | None = None
    plain: bool = False

    def run(self, work: Work, prompts: list[list[int]], new_tokens: int) -> float:
        way = replace(work, sampling=PLAIN) if self.plain else work
        return self.generate(prompts, work.copies, new_tokens, way.asked(new_tokens))


@dataclass(frozen=True)
class Times:
    """Seconds of a side's rounds: whole calls, and calls for one token."""

    whole: list[float]
    first: list[float]

    def step_ms(self, new_tokens: int) -> float:
        whole, first = statistics.median(self.whole), statistics.median(self.first)
        # where noise is more than the steps take, not zero: others divide by it
        return max(whole - first, 1e-9) / max(1, new_tokens - 1) * 1e3


@dataclass(frozen=True)
class Found:
    """Times of the sides that ran to the end, by name; the family of each side that has one; and
    seconds of the first round of those that did not go on."""

    times: Mapping[str, Times]
    families: Mapping[str, str]
    tried: Mapping[str, float]

    def rival(self, family: str) -> str | None:
        going = (name for name in self.times if self.families.get(name) == family)
        return next(going, None)

    def seconds(self, family: str) -> float:
        name = self.rival(family)
        return float("inf") if name is None else statistics.median(self.times[name].whole)


def measure(
    sides: Mapping[str, Side], work: Work, vocab_size: int, rounds: int, seed: int = 0
) -> Found:
    """Run the sides in turns, after a warm-up of each. seed: of the prompts, of which none comes
    twice."""
    running = dict(sides)
    families = {name: side.family for name, side in sides.items() if side.family is not None}
    seeds = itertools.count(seed)

    def turn(new_tokens: int) -> dict[str, float]:
        prompts = work.prompts(vocab_size, next(seeds))
        return {name: side.run(work, prompts, new_tokens) for name, side in running.items()}

    for _ in range(2):
        turn(min(WARM_UP, work.new_tokens))
    whole, first = [], []
    for i in range(rounds * FIRST_ROUNDS if work.is_first else rounds):
        whole.append(turn(work.new_tokens))
        if i == 0:
            going = fastest(whole[0], families)
            running = {name: side for name, side in sides.items() if name in going}
        first.append(whole[-1] if work.is_first else turn(1))
        if i < rounds:
            seconds = ", ".join(f"{name} {value:.3g} s" for name, value in whole[-1].items())
            say(f"{work.title}, round {i + 1} of {rounds}: {seconds}")
    return Found(
        {
            name: Times([times[name] for times in whole], [times[name] for times in first])
            for name in running
        },
        families,
        {name: seconds for name, seconds in whole[0].items() if name not in running},
    )


def keep(held: dict[str, Found], new: Found) -> None:
    """Keep what was measured of a work, by family ("" when there is none).

    New times take the place of others where the rival is faster. Sides that had no turn beside ours
    are held against ours alone.
    """
    if OURS not in new.times:
        new = replace(new, times={**held[""].times, **new.times})
    for family in set(new.families.values()) or {""}:
        old = held.get(family)
        if old is None:
            held[family] = new
            continue
        best, other = sorted((old, new), key=lambda found: found.seconds(family))
        lost = other.rival(family)
        beaten = {} if lost is None else {lost: other.times[lost].whole[0]}
        held[family] = replace(
            best,
            families={**other.families, **best.families},
            tried={**other.tried, **best.tried, **beaten},
        )


# -- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A work of a model in a format. codes: of 4 bits, without dense copies; read: the bandwidth in
    bytes a second; notes: what a reader must know; touched: experts that a step reads."""

    model: str
    format: str
    codes: bool
    work: Work
    read: float
    notes: Sequence[str] = ()
    touched: float | None = None

    @property
    def name(self) -> str:
        return targets.named(self.model, self.format, self.work.title, self.codes)


def rows_of(case: Case, held: Mapping[str, Found]) -> list[Row]:
    found = held.get(case.format) or next(iter(held.values()))
    rows = _against(case, found, case.format)
    for family in held:
        if family not in ("", case.format):
            rows += _against(case, held[family], family)
    if OWN_PLAIN in found.times:
        rows.append(_over_plain(case, found))
    if case.touched is not None:
        rows.append(_experts(case, bool(found.families)))
    return targets.aimed(
        replace(row, note="; ".join(filter(None, (row.note, *case.notes)))) for row in rows
    )


def _against(case: Case, found: Found, family: str) -> list[Row]:
    name, work = found.rival(family), case.work
    ours, peer = found.times[OURS], None if name is None else found.times[name]
    tokens = work.batch * work.new_tokens
    tried = [
        f"{other}: {tokens / seconds:,.0f} tokens/s at first"
        for other, seconds in found.tried.items()
        if found.families[other] == family
    ]
    over = "" if family == case.format else targets.over_family(family)
    return [
        replace(row, name=row.name + over, against=name or "", note="; ".join(tried))
        for row in _kinds(case, ours, peer)
    ]


def _kinds(case: Case, ours: Times, peer: Times | None) -> list[Row]:
    work, name, new = case.work, case.name, case.work.new_tokens

    def speed(title: str, tokens: int, which: str) -> Row:
        theirs = None if peer is None else getattr(peer, which)
        return speed_row(title, tokens, "tokens/s", getattr(ours, which), theirs)

    if work.is_first:
        theirs = None if peer is None else statistics.median(peer.whole) * 1e3
        return [
            less_row(targets.first_answer(name), "ms", statistics.median(ours.whole) * 1e3, theirs)
        ]
    step, other = ours.step_ms(new), None if peer is None else peer.step_ms(new)
    rows = [
        speed(targets.rollout(name), work.batch * new, "whole"),
        less_row(targets.decoding(name), "ms", step, other),
    ]
    if work.is_apart:
        rows.append(speed(targets.prefill(name), work.batch * work.prompt_tokens, "first"))
    if work.is_step:
        context = work.prompt_tokens + new / 2
        num_bytes = step_bytes(SHAPES[case.model], case.format, work.batch, context, case.touched)
        ideal = num_bytes / case.read * 1e3
        theirs_share = None if other is None else ideal / other
        ratio = None if other is None else other / step
        rows.append(Row(targets.roof(name), "fraction", ideal / step, theirs_share, ratio))
    return rows


def _over_plain(case: Case, found: Found) -> Row:
    tokens = case.work.batch * case.work.new_tokens
    ours, plain = (found.times[side].whole for side in (OURS, OWN_PLAIN))
    row = speed_row(targets.over_plain(case.name), tokens, "tokens/s", ours, plain)
    return replace(row, against=OWN_PLAIN)


def _experts(case: Case, beside: bool) -> Row:
    """Return the row of experts: ours as counted, and the mean of vLLM's simulator."""
    config, batch = SHAPES[case.model], case.work.batch
    return Row(
        f"{case.name}: experts touched by a step",
        f"of {config['num_experts']}",
        case.touched,
        roofline.simulated(config, batch) if beside else None,
        must=0.95 * roofline.uniform(config, batch),
        goal="ours at least",
    )
