"""Environments that answer wrongly, in the real worker pool: an error of that item alone, which names
the environment and the line, and nothing that could not be written down as JSON."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowroll.envs.return_values import InvalidReply, as_messages
from lowroll.envs.scorer_pool import ScorerPool, _decode
from lowroll.tool_calls import MOST_DEPTH
from lowroll.types import Prompt, ScoreError

ODD = """
import os, time
from lowroll.envs import GeneratedEnvironment

class Odd(GeneratedEnvironment):
    max_turns = 3
    def task(self, rng): return str(rng.random()), {}
    def score(self, prompt, text): return 0.0
    def gold(self, prompt): return ""
    def perturbed(self, prompt): return ""
    def respond(self, prompt, messages):
        how = prompt.info["how"]
        if how == "raises": return {}["x"]
        if how == "hangs": time.sleep(99)
        if how == "ends": os._exit(3)
        if how == "fills": bytearray(1 << 40)
        if how == "text": return "more"
        if how == "half": return [{"role": "user", "content": "a\\ud800"}]
        if how == "huge": return [{"role": "user", "content": "x" * 10**7}]
        messages.clear()
        return [{"role": "user", "content": "more"}]
"""
FAULTS = {
    "raises": ("exception", "KeyError: 'x' ("),
    "hangs": ("timeout", "no answer after 3 s"),
    "ends": ("crash", "exit status 3"),
    "fills": ("memory", "out of memory"),
    "text": ("invalid", "respond returned 'more'"),
    "half": ("invalid", "surrogates not allowed"),
    "huge": ("invalid", "500,000 at most"),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScorerPool]:
    file = tmp_path_factory.mktemp("odd") / "odd.py"
    file.write_text(ODD)
    with ScorerPool({"odd": (str(file), {}, 0)}, 1, time_limit=3.0, memory_limit_mb=4096) as made:
        yield made


@pytest.mark.slow
def test_a_fault_is_an_error_of_its_item_alone(pool: ScorerPool) -> None:
    hows = [how for fault in FAULTS for how in (fault, "good")]
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    items = [(Prompt(f"train/{how}", "odd", said[:1], {"how": how}), said) for how in hows]
    for how, found in zip(hows, pool.respond(items), strict=True):
        if how == "good":
            assert found == [{"role": "user", "content": "more"}]
            continue
        kind, words = FAULTS[how]
        assert isinstance(found, ScoreError) and found.kind == kind
        assert found.message.startswith(f"env 'odd', train/{how}: ") and words in found.message
        assert how != "raises" or "odd.py:13)" in found.message


def _nested(depth: int) -> object:
    found: object = "x"
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("extra", [_nested(MOST_DEPTH), {"\udc00": 1}, float("inf"), {1, 2}])
def test_messages_that_could_not_be_kept_are_refused(extra: object) -> None:
    """By a rollout's file, or by the next turn."""
    with pytest.raises(InvalidReply, match="respond returned messages that are n"):
        as_messages([{"role": "tool", "content": "a", "more": extra}])
    kept = [{"role": "tool", "content": "é", "more": _nested(MOST_DEPTH - 3)}]
    assert as_messages(kept) == kept


def test_a_reply_without_end_is_none() -> None:
    assert _decode(b"[" * 10**6) == {} == _decode(b"\xff")
