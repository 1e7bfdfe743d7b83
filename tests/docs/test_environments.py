"""The page about environments: its conversation works."""

from __future__ import annotations

from pathlib import Path

from lowroll.config.load import from_mapping
from lowroll.envs import make
from lowroll.envs.scorer_pool import ScorerPool
from tests.fixtures.pages import DOCS, blocks

PAGE = DOCS / "environments.md"


def test_the_environment_of_the_page_answers_and_scores(tmp_path: Path) -> None:
    file = tmp_path / "halves.py"
    file.write_text(blocks(PAGE, "python")[1])
    env = make(str(file), name="halves")
    assert env.validate(8).ok
    prompt = env.prompt(0)
    right = {"role": "assistant", "content": prompt.info["answer"]}
    wrong = {"role": "assistant", "content": "0"}
    no = {"role": "user", "content": "No. Try again."}
    with ScorerPool({"halves": (str(file), {}, 0)}, 1) as pool:
        first = [(prompt, [*prompt.messages, said]) for said in (right, wrong)]
        assert pool.respond(first) == [None, [no]]
        whole = [(prompt, [*prompt.messages, *said]) for said in ([right], [wrong, no, right])]
        assert [one.reward for one in pool.score(whole)] == [1.0, 0.5]


def test_the_settings_of_the_page_are_read() -> None:
    import yaml

    cfg = from_mapping({"model": "m", "output_dir": "o", **yaml.safe_load(blocks(PAGE, "yaml")[0])})
    env = make(cfg.env[0].id, args=dict(cfg.env[0].args))
    assert (env.max_turns, env.max_sequence_tokens) == (3, 256)
