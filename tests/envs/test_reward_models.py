"""Reward models among the reward functions: sequence classifiers of transformers, read as TRL reads
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from lowroll.config import load
from lowroll.envs import make
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.types import Score

WORDS = ["<pad>", "<end>", "user:", "assistant:", "two", "plus", "three", "five", "four", "no"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}<end>"
CHAT = [{"role": "user", "content": "two plus three"}]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a tiny reward model."""
    folder = tmp_path_factory.mktemp("models") / "judge"
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="no"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", bos_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def rows(folder: Path, prompt: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": prompt}) + "\n")
    return path


def by_hand(judge: Path, text: str) -> float:
    """One text alone, without padding."""
    model = LlamaForSequenceClassification.from_pretrained(judge, num_labels=1)
    ids = PreTrainedTokenizerFast.from_pretrained(judge)(text, add_special_tokens=False)
    model.config.pad_token_id = 1
    with torch.no_grad():
        return float(model(torch.tensor([ids["input_ids"]])).logits[0, 0])


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("two plus three", ["two plus three five", "two plus three four no"]),
        (
            CHAT,
            [
                "user: two plus three assistant: five <end>",
                "user: two plus three assistant: four no <end>",
            ],
        ),
    ],
)
def test_a_folder_of_a_classifier_is_a_reward_function(
    judge: Path, tmp_path: Path, prompt: Any, texts: list[str]
) -> None:
    settings = {"path": str(rows(tmp_path, prompt)), "held_out": 0, "reward_funcs": [str(judge)]}
    asked = make("data", args=settings).prompt(0)
    said = [" five", " four no"] if isinstance(prompt, str) else ["five", "four no"]
    with ScorerPool({"data": ("data", settings, 0)}, 1, memory_limit_mb=32_000) as pool:
        found = pool.score([(asked, text) for text in said])
    for score, text in zip(found, texts, strict=True):
        assert isinstance(score, Score), score
        assert score.metrics == {"judge": score.reward}
        assert score.reward == pytest.approx(by_hand(judge, text), abs=1e-5)


def test_what_is_no_reward_model_is_refused(judge: Path, tmp_path: Path) -> None:
    data = str(rows(tmp_path, "x"))

    def refused(folder: Path) -> str:
        with pytest.raises(ValueError, match="reward_funcs: ") as caught:
            make("data", args={"path": data, "held_out": 0, "reward_funcs": [str(folder)]})
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path / "empty")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((judge / "config.json").read_text())
    (pickled / "pytorch_model.bin").write_bytes(b"")
    assert "has no weights as safetensors" in refused(pickled)
    code = tmp_path / "code"
    code.mkdir()
    config = json.loads((judge / "config.json").read_text())
    config["auto_map"] = {"AutoModelForSequenceClassification": "evil.Model"}
    (code / "config.json").write_text(json.dumps(config))
    (code / "model.safetensors").write_bytes((judge / "model.safetensors").read_bytes())
    (code / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nModel = 1\n")
    assert "brings code of its own" in refused(code)
    assert not (tmp_path / "canary").exists()


def test_weights_without_a_head_are_refused(judge: Path, tmp_path: Path) -> None:
    """transformers would draw one at random."""
    plain = tmp_path / "plain"
    model = LlamaForSequenceClassification.from_pretrained(judge, num_labels=1)
    weights = {name: one for name, one in model.state_dict().items() if name != "score.weight"}
    model.save_pretrained(plain, state_dict=weights)
    for file in judge.glob("token*"):
        (plain / file.name).write_bytes(file.read_bytes())
    args = {"path": str(rows(tmp_path, "x")), "held_out": 0, "reward_funcs": [str(plain)]}
    with pytest.raises(ValueError, match="its weights lack score.weight"):
        make("data", args=args).prepare()


def test_a_folder_is_looked_for_beside_the_file(judge: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/judge").symlink_to(judge)
    rows(tmp_path, "x")
    (tmp_path / "run.yaml").write_text("model: m\ndata: rows.jsonl\nreward_funcs: [models/judge]\n")
    (env,) = load(tmp_path / "run.yaml").env
    assert env.args["reward_funcs"] == [str(tmp_path / "models/judge")]


def test_a_model_of_the_hub_is_looked_for_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    args = {"path": str(rows(tmp_path, "x")), "held_out": 0, "reward_funcs": ["nobody/no-model"]}
    with pytest.raises(ValueError, match="reward_funcs: 'nobody/no-model' .* could not deliver it"):
        make("data", args=args)
    args["reward_funcs"] = ["no_model"]
    with pytest.raises(ValueError, match="'no_model' names no function; write .* a folder"):
        make("data", args=args)


def test_a_model_of_several_labels_is_refused(judge: Path, tmp_path: Path) -> None:
    two = tmp_path / "two"
    two.mkdir()
    for file in judge.iterdir():
        (two / file.name).write_bytes(file.read_bytes())
    config = json.loads((two / "config.json").read_text())
    config |= {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    (two / "config.json").write_text(json.dumps(config))
    args = {"path": str(rows(tmp_path, "x")), "held_out": 0, "reward_funcs": [str(two)]}
    with pytest.raises(ValueError, match="has 2 labels, and a reward model has one"):
        make("data", args=args)
