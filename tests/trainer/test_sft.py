"""Supervised warm start: exact loss, falling loss, what a demonstration becomes, and clear errors
for bad files."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from lowroll.config import from_mapping
from lowroll.envs.base import Environment
from lowroll.model import hf
from lowroll.model.tokenizer import ChatTokenizer, load_tokenizer
from lowroll.runs.sft import demonstrations, run_sft
from lowroll.trainer.optim import OptimSettings
from lowroll.trainer.sft import (
    Demonstration,
    SftLearner,
    SftSettings,
    encode,
    epochs,
    read_demonstrations,
)
from lowroll.trainer.step import TrainingDiverged
from lowroll.types import Prompt, Score
from tests.fixtures.learner import dense_log_probs, tiny_model


class Letters:
    """A tokenizer of letters: a=2, b=3, ...; user messages open with 40, a response is asked for
    with 41."""

    eos_token_id, special_tokens_map = 1, {}
    chat_template = "{% for m in messages %}<{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"

    def get_chat_template(self):
        return self.chat_template

    def encode(self, text, add_special_tokens=True):
        assert add_special_tokens is False
        return [2 + ord(c) - ord("a") for c in text]

    def __call__(self, text, add_special_tokens):
        marks = {"<": 40, ">": 41}
        return {
            "input_ids": [
                marks[c] if c in marks else self.encode(c, add_special_tokens)[0] for c in text
            ]
        }


def ask(text, response):
    return Demonstration([{"role": "user", "content": text}], response)


REVERSED = [ask(text, text[::-1]) for text in ("abc", "bca", "cab", "ab", "ba", "ac", "cb", "aab")]


def test_a_demonstration_becomes_prompt_and_response_with_the_end_of_turn():
    sample = encode(ChatTokenizer(Letters()), ask("ab", "ba"))
    assert sample.prompt_ids == [40, 2, 3, 41]
    assert sample.rollout.token_ids == [3, 2, 1]
    assert sample.loss_mask == [1, 1, 1] and sample.advantage == 1.0
    assert sample.rollout.logprobs == [0.0, 0.0, 0.0]  # it was given, not drawn


def test_a_tokenizer_without_an_end_is_refused():
    tokenizer = Letters()
    tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match="end-of-sequence"):
        SftLearner(tiny_model(), ChatTokenizer(tokenizer), REVERSED, SftSettings(1))


@pytest.mark.parametrize("capacity", [1, 16, 10_000])
def test_the_loss_is_the_token_mean_of_the_dense_model(capacity):
    model = tiny_model()
    samples = [encode(ChatTokenizer(Letters()), d) for d in REVERSED]
    with torch.no_grad():
        logp = torch.cat([dense_log_probs(model, s, temperature=1.0) for s in samples])
    settings = SftSettings(len(REVERSED), tokens_per_microbatch=capacity)
    metrics = SftLearner(model, ChatTokenizer(Letters()), REVERSED, settings).step()
    assert metrics["sft/loss"] == pytest.approx(-float(logp.mean()), abs=1e-5)
    assert metrics["sft/tokens"] == len(logp) == 28
    assert metrics["optim/skipped"] == 0


@pytest.mark.slow
def test_the_loss_falls_and_the_greedy_response_is_the_demonstration():
    model = tiny_model()
    settings = SftSettings(
        8,
        OptimSettings(
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            total_steps=80,
            weight_decay=0.0,
        ),
        tokens_per_microbatch=64,
    )
    learner = SftLearner(model, ChatTokenizer(Letters()), REVERSED, settings)
    seen = [learner.step()["sft/loss"] for _ in range(80)]
    assert seen[0] > 2.0 and seen[-1] < 0.05
    sample = encode(ChatTokenizer(Letters()), ask("cab", "bac"))
    with torch.no_grad():
        assert float(dense_log_probs(model, sample, temperature=1.0).exp().min()) > 0.8


def test_runs_with_one_seed_are_the_same_and_with_another_differ():
    def weights(seed):
        model = tiny_model()
        settings = SftSettings(3, OptimSettings(learning_rate=1e-2), seed=seed)
        learner = SftLearner(model, ChatTokenizer(Letters()), REVERSED, settings)
        for _ in range(2):
            learner.step()
        return torch.cat([p.detach().flatten() for p in model.trainable_parameters().values()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_diverged_run_stops():
    model = tiny_model()
    before = {n: p.detach().clone() for n, p in model.trainable_parameters().items()}
    model.register_forward_hook(lambda m, args, out: out * math.nan)
    learner = SftLearner(model, ChatTokenizer(Letters()), REVERSED, SftSettings(4))
    for _ in range(2):
        assert learner.step()["optim/skipped"] == 1
    with pytest.raises(TrainingDiverged, match="sft: loss nan"):
        learner.step()
    assert all(torch.equal(p, before[n]) for n, p in model.trainable_parameters().items())


def test_demonstrations_that_the_model_cannot_read_are_refused():
    with pytest.raises(ValueError, match=r"sample 1 .*token_ids leaves 0..63"):
        SftLearner(
            tiny_model(),
            ChatTokenizer(Letters()),
            [ask("ab", "ba"), ask("a", "\u00ff")],
            SftSettings(1),
        )
    with pytest.raises(ValueError, match="samples|examples"):
        SftLearner(tiny_model(), ChatTokenizer(Letters()), [], SftSettings(1)).step()


def test_every_epoch_visits_everything_once_in_a_new_order():
    drawn = list(itertools.islice(epochs(50, seed=3), 150))
    thirds = [drawn[k : k + 50] for k in (0, 50, 100)]
    assert all(sorted(t) == list(range(50)) for t in thirds)
    assert thirds[0] != thirds[1] != thirds[2]
    assert drawn == list(itertools.islice(epochs(50, seed=3), 150))


class Counting(Environment):
    """Task i is the number i; every third has no stored answer."""

    def __init__(self, name, size):
        super().__init__(name=name)
        self.tasks = size

    def size(self, split="train"):
        return self.tasks

    def prompt(self, index, split="train"):
        return Prompt(
            f"{split}/{index}", self.name, [{"role": "user", "content": f"{self.name} {index}"}]
        )

    def gold(self, prompt):
        if int(prompt.id.split("/")[1]) % 3 == 2:
            raise NotImplementedError
        return prompt.id

    def score(self, prompt, text):
        return Score(1.0)

    def perturbed(self, prompt):
        return ""


def test_demonstrations_come_from_the_environments_by_weight():
    drawn = demonstrations([(Counting("a", None), 3.0), (Counting("b", None), 1.0)], 400, seed=1)
    assert len(drawn) == 400
    share = sum(d.messages[0]["content"].startswith("a ") for d in drawn) / 400
    assert 0.68 < share < 0.82
    assert drawn == demonstrations(
        [(Counting("a", None), 3.0), (Counting("b", None), 1.0)], 400, seed=1
    )


def test_demonstrations_end_with_the_tasks_that_have_an_answer():
    drawn = demonstrations([(Counting("a", 9), 1.0)], 400)
    assert [d.response for d in drawn] == [f"train/{i}" for i in (0, 1, 3, 4, 6, 7)]
    with pytest.raises(ValueError, match="empty gave no gold answer"):
        demonstrations([(Counting("empty", 0), 1.0)], 4)


def test_an_endless_environment_without_answers_is_asked_twice_as_often_as_needed():
    asked = []

    class Silent(Counting):
        def gold(self, prompt):
            asked.append(prompt.id)
            raise NotImplementedError

    with pytest.raises(ValueError, match="silent gave no gold answer"):
        demonstrations([(Silent("silent", None), 1.0)], 4)
    assert asked == [f"train/{i}" for i in range(8)]


def test_a_conversation_gives_one_demonstration_for_each_reply(tmp_path):
    turns = [
        {"role": r, "content": c}
        for r, c in (
            ("system", "s"),
            ("user", "u1"),
            ("assistant", "a1"),
            ("user", "u2"),
            ("assistant", "a2"),
        )
    ]
    path = tmp_path / "data.jsonl"
    path.write_text(
        json.dumps({"messages": turns}) + "\n\n" + json.dumps({"messages": turns[1:3]}) + "\n"
    )
    assert read_demonstrations(path) == [
        Demonstration(turns[:2], "a1"),
        Demonstration(turns[:4], "a2"),
        Demonstration(turns[1:2], "a1"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ":2: "),
        ("[]", ':2: expected {"messages"'),
        ('{"messages": []}', ":2: messages: a conversation must end"),
        (
            '{"messages": [{"role": "user", "content": "u"}]}',
            ":2: messages: a conversation must end",
        ),
        ('{"messages": [{"role": "bot", "content": "u"}]}', r":2: messages\[0\]: role"),
        ('{"messages": [{"role": "user", "content": 3}]}', r":2: messages\[0\]: role"),
        ('{"messages": [{"role": "user"}]}', r":2: messages\[0\]: expected"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, words):
    good = json.dumps(
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
    )
    path = tmp_path / "data.jsonl"
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=f"data.jsonl{words}"):
        read_demonstrations(path)


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no demonstration"):
        read_demonstrations(path)


@pytest.fixture
def model_folder(tmp_path):
    """A model folder with a word-level tokenizer of the lower-case letters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<eos>", "<user>", "<assistant>", *"abcdefghijklmnopqrstuvwxyz", " "]
    words = Tokenizer(
        models.WordLevel({"<unk>": 0} | {w: i for i, w in enumerate(letters, 1)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return hf.save(
        tiny_model(eos_token_id=1), tmp_path / "model", tokenizer_from=tmp_path / "tokenizer"
    )


@pytest.mark.slow
def test_the_command_publishes_a_model_that_learned_the_demonstrations(tmp_path, model_folder):
    rows = [
        {"messages": [*d.messages, {"role": "assistant", "content": d.response}]} for d in REVERSED
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = from_mapping(
        {
            "model": str(model_folder),
            "output_dir": str(tmp_path / "run"),
            "device": "cpu",
            "train": {"weight_decay": 0.0},
            "sft": {
                "data": str(tmp_path / "data.jsonl"),
                "steps": 30,
                "batch_size": 8,
                "learning_rate": 0.01,
            },
        }
    )
    result = run_sft(cfg)
    path, records = result.folder / "final", result.records
    assert [r["step"] for r in records] == list(range(1, 31))
    assert records[-1]["sft/loss"] < 0.7 * records[0]["sft/loss"]
    before, after = hf.load(model_folder), hf.load(path)
    samples = [encode(ChatTokenizer(load_tokenizer(path)), d) for d in REVERSED]
    gains = [
        float((dense_log_probs(after, s, 1.0) - dense_log_probs(before, s, 1.0)).detach().mean())
        for s in samples
    ]
    assert min(gains) > 0.3
    with pytest.raises(ValueError, match="output_dir"):
        run_sft(cfg)


def test_the_command_takes_demonstrations_from_the_environments(tmp_path, model_folder):
    cfg = from_mapping(
        {
            "model": str(model_folder),
            "output_dir": str(tmp_path / "run"),
            "device": "cpu",
            "env": [{"id": "reverse-text", "args": {"min_len": 2, "max_len": 4}}],
            "sft": {"num_examples": 16, "steps": 2, "batch_size": 4},
        }
    )
    records = run_sft(cfg).records
    assert len(records) == 2 and records[0]["sft/tokens"] >= 4 * 3
