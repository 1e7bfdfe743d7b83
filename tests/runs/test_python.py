"""What a caller in Python may hand over: settings as a file, a mapping or a RunConfig; prompts as
ids or as text."""

from __future__ import annotations

from pathlib import Path

import pytest

import lowroll
from lowroll.config import ConfigError, RunConfig, as_config
from lowroll.model import hf
from lowroll.runs import demo

TINY = {
    **demo.CONFIG,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_settings_of_a_run(tmp_path: Path) -> None:
    tree = {"model": "m", "train": {"max_steps": 7}, "rollout": {"top_p": 0.9}}
    (tmp_path / "run.yaml").write_text("model: m\ntrain: {max_steps: 7}\nrollout: {top_p: 0.9}\n")
    given = RunConfig(model="m", train={"max_steps": 7}, rollout={"top_p": 0.9})  # type: ignore[arg-type]
    for one in (tree, tmp_path / "run.yaml", str(tmp_path / "run.yaml"), given):
        cfg = as_config(one, {"train.max_steps": 9, "seed": 3}).resolved()
        assert (cfg.train.max_steps, cfg.seed, cfg.rollout.top_p) == (9, 3, 0.9)
        assert (
            cfg.objective_options["veto"] == 1e-4
        )  # an override leaves to `auto` what was left to it
        assert as_config(one).train.max_steps == 7
    for bad, told in (
        (3, "expected a path, a mapping or a RunConfig, got int"),
        ({"model": "m", "trian": {}}, r"trian: unknown key \(did you mean train\?\)"),
    ):
        with pytest.raises(ConfigError, match=told):
            lowroll.run(bad)  # type: ignore[arg-type]


def test_prompts_as_text(model: Path) -> None:
    engine = lowroll.Engine(model, cache_tokens=2048)
    said, plain, ids = (
        engine.generate("two words", n=2, max_tokens=4, seed=5)[0],
        engine.generate("two words", chat=False, max_tokens=4)[0],
        engine.tokenizer.encode("two words"),
    )
    chat = [{"role": "user", "content": "two words"}]
    assert said.request == lowroll.Request(
        engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False),
        n=2,
        max_tokens=4,
        seed=5,
    )
    assert plain.request.prompt_ids == ids and len(said.rollouts) == 2
    assert engine.text(said.rollouts[0]) == engine.tokenizer.decode(
        said.rollouts[0].token_ids, skip_special_tokens=True
    )
    mixed = engine.generate(["a", lowroll.Request(prompt_ids=ids, max_tokens=2)], max_tokens=3)
    assert [group.request.max_tokens for group in mixed] == [3, 2]
    for call, told in (
        (
            lambda: engine.generate("a", max_token=3),
            "max_token: a request has no such field; it has n,",
        ),
        (lambda: engine.generate([lowroll.Request(prompt_ids=ids)], n=3), "n: a Request says this"),
        (
            lambda: engine.generate([[5, 6]]),
            r"requests\[0\]: expected a text or a Request \(token ids",
        ),
        (
            lambda: engine.generate(5),
            "requests: expected a text, a Request or a list of them, got int",
        ),
        (lambda: engine.generate(["a", "b"], top_p=2), r"requests\[0\]\.top_p"),
        (
            lambda: lowroll.Engine(hf.load(model), cache_tokens=512).generate("a"),
            r"pass Engine\(...",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            call()
