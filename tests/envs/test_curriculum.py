"""Levels of difficulty: the rule, the levels of reasoning-gym, and a run whose level moves and which
goes on with it after a restart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lowroll.envs import make
from lowroll.envs.curriculum import Curriculum, LevelProgress
from lowroll.orchestrator.ledger import Ledger
from lowroll.types import Prompt
from tests.fixtures.fakes import FakeEnv, build

RULE = Curriculum(levels=3, window=4)


@pytest.mark.parametrize(
    ("before", "means", "after"),
    [
        (LevelProgress(1), [1.0, 1.0, 1.0], LevelProgress(1, 3, 3.0)),  # too few to say
        (LevelProgress(1, 3, 3.0), [0.2], LevelProgress(2)),  # 3.2 / 4 is 0.8
        (
            LevelProgress(1, 3, 3.0),
            [0.1],
            LevelProgress(1),
        ),  # between the two: counting begins anew
        (LevelProgress(1, 3, 0.5), [0.3], LevelProgress(0)),  # 0.8 / 4 is 0.2
        (LevelProgress(2, 3, 3.0), [1.0], LevelProgress(2)),  # the last level
        (LevelProgress(0, 3, 0.0), [0.0, 0.0], LevelProgress(0)),  # the first one
        (LevelProgress(1, 2, 1.0), [], LevelProgress(1, 2, 1.0)),
    ],
)
def test_the_rule(before: LevelProgress, means: list[float], after: LevelProgress) -> None:
    assert before.after(RULE, means) == after
    assert LevelProgress.of(vars(after)) == after


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"start": 3}, "start is 3, and the levels are 0 to 2"),
        ({"start": -1}, "start must be a count"),
        ({"window": 0}, "window must be a count"),
        ({"window": True}, "window must be a count"),
        ({"raise_at": "1"}, "raise_at must be a number"),
        ({"raise_at": 0.1}, r"lower_at \(0.2\) must lie below raise_at \(0.1\)"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Curriculum(**{"levels": 3, **settings})


class Stairs(FakeEnv):
    """A task of level k asks for k + 1 letters."""

    def prompt(self, index: int, split: str = "train") -> Prompt:
        number, level = divmod(index, 3)
        prompt = super().prompt(index, split)
        return replace(prompt, info={"level": level, "number": number})


def stairs() -> Any:
    env = Stairs("stairs", curriculum=Curriculum(levels=3, window=4, raise_at=0.05, lower_at=0.0))
    return build(envs=[env])


def walk(orchestrator: Any, steps: range) -> list[tuple[int, int]]:
    """Number and level of each prompt."""
    found = []
    for step in steps:
        batch = orchestrator.step(step)
        prompts = {sample.prompt.id: sample.prompt for sample in batch.samples}
        found += [(one.info["number"], one.info["level"]) for one in prompts.values()]
    return found


def test_levels_move_by_the_measured_reward_and_resume_exactly() -> None:
    whole = stairs()
    walked = walk(whole, range(1, 9))
    assert [number for number, _ in walked] == list(range(16))  # the cursor counts tasks
    assert len({level for _, level in walked}) > 1
    halves = stairs()
    first = walk(halves, range(1, 4))
    resumed = stairs()
    resumed.restore(halves.state())
    assert first + walk(resumed, range(4, 9)) == walked
    assert resumed.state() == whole.state()
    assert (
        whole.state()["ledger"]["levels"]["stairs"]["level"] == whole.ledger.levels["stairs"].level
    )


def test_without_a_curriculum_the_state_is_as_it_was() -> None:
    assert "levels" not in Ledger().state()
    plain = build()
    plain.step(1)
    assert "levels" not in plain.state()["ledger"]


@pytest.mark.parametrize(
    "levels",
    [
        {"e": {"level": 1}},
        {"other": vars(LevelProgress(1))},
        {"e": 3},
        3,
        {"e": {"level": -1, "groups": 0, "total": 0.0}},
    ],
)
def test_a_damaged_state_is_refused(levels: Any) -> None:
    with pytest.raises(ValueError, match="ledger.levels"):
        Ledger.of({**Ledger(cursors={"e": 0}).state(), "levels": levels}, {"e"})


def gym(**args: Any) -> Any:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    return make("reasoning-gym/chain_sum", name="sums", args=args)


@pytest.mark.slow
def test_levels_of_a_generator() -> None:
    env = gym(curriculum={"levels": 4, "window": 8})
    assert env.curriculum == Curriculum(levels=4, window=8)
    lengths = []
    for level in range(4):
        prompts = [env.prompt(env.curriculum.position(n, level)) for n in range(20)]
        assert {one.info["level"] for one in prompts} == {level}
        assert all(env.score(one, env.gold(one)).metrics["level"] == level for one in prompts)
        lengths.append(sum(len(one.messages[-1]["content"]) for one in prompts))
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert env.prompt(5) == gym(curriculum={"levels": 4, "window": 8}).prompt(5)
    assert env.validate(16, "test").ok  # which holds all levels alike
    plain = gym()
    assert plain.curriculum is None and "level" not in plain.prompt(0).info


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"curriculum": "yes"}, "expected true or a mapping, got 'yes'"),
        ({"curriculum": {"level": 2}}, "no setting 'level' .did you mean 'levels'"),
        ({"curriculum": {"levels": 99}}, "levels: reasoning-gym/chain_sum has 11"),
        ({"curriculum": True, "min_terms": 3}, "min_terms is moved by the curriculum"),
    ],
)
def test_a_curriculum_that_is_none(args: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"env 'sums': .*{why}"):
        gym(**args)


@pytest.mark.slow
def test_a_composite_has_the_levels_of_its_parts() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    parts = [{"name": "chain_sum", "weight": 3}, {"name": "spell_backward"}]
    env = make("reasoning-gym/composite", args={"datasets": parts, "curriculum": {"window": 8}})
    assert env.curriculum is not None and env.curriculum.levels == 11
    for level in (0, 10):
        asked = [env.prompt(env.curriculum.position(n, level)) for n in range(24)]
        spelled = [one for one in asked if "backward" in one.messages[-1]["content"]]
        assert 0 < len(spelled) < 12
        assert all(env.score(one, env.gold(one)).reward == 1.0 for one in asked)
    with pytest.raises(ValueError, match="reasoning-gym/acre has no curriculum"):
        make("reasoning-gym/composite", args={"datasets": [{"name": "acre"}], "curriculum": True})
