"""Answers over HTTP: what the engine draws, bit for bit, in every shape that clients know."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lowroll import Engine, Request
from lowroll.engine.remote.protocol import unpack
from lowroll.types import Group, Rollout
from tests.fixtures import engines
from tests.fixtures.http import NAME, events, get, post, serving

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
SAID = {"messages": [{"role": "user", "content": "a"}]}
SCORED = {"max_tokens": 0, "prompt_logprobs": 0}
PACKED = {"prompt": "a", "packed": True, "return_token_ids": True}


engine_of = partial(engines.engine_of, cache_tokens=8192, max_batch=32)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    """What the server has; for the tests' own use there is `reference`."""
    return engine_of(model, exact=True)


@pytest.fixture(scope="module")
def reference(model: Path) -> Engine:
    return engine_of(model, exact=True)


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine, tokenizer=engine.tokenizer) as found:
        yield found


def prompt(seed: int, length: int = 7) -> list[int]:
    """Ids of bytes, with no first page in common with another seed's."""
    return random.Random(seed).choices(range(5, 100), k=length)


def answer(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, tree = post(url + path, {"model": NAME, **body})
    assert status == 200, tree
    return tree


def refusal(url: str, path: str, body: object) -> tuple[int, str | None, str]:
    status, tree = post(url + path, body)
    error = tree["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error["param"], error["message"]


def as_json(rollout: Rollout) -> dict[str, Any]:
    """Its tag as JSON."""
    tag = asdict(rollout.behavior)
    return tag | {"policy": list(tag["policy"])}


# -- bit for bit -----------------------------------------------------------------------------------


def told(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def joined(
    parts: list[dict[str, Any]], index: int
) -> tuple[list[int], list[float], str, str | None]:
    """Tokens, log-probs, text and end of a streamed choice."""
    mine = [c for part in parts for c in part["choices"] if c["index"] == index]
    assert [c["finish_reason"] for c in mine[:-1]] == [None] * (len(mine) - 1)
    ids = [i for c in mine for i in c["token_ids"]]
    logprobs = [p for c in mine for p in c["logprobs"]["token_logprobs"]]
    return ids, logprobs, "".join(c["text"] for c in mine), mine[-1]["finish_reason"]


def unpacked(parts: list[dict[str, Any]], index: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probs of a packed choice in a stream."""
    mine = [c["packed"] for part in parts for c in part["choices"] if c["index"] == index]
    pieces = [unpack(one) for one in mine]
    return [i for ids, _ in pieces for i in ids], [p for _, ps in pieces for p in ps]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_tokens_and_logprobs_are_those_of_the_engine(model: Path, weights: str) -> None:
    """Streamed or not, of ids or text, for a conversation or a trainer, of one sample or eight."""
    served, reference = (engine_of(model, weights=weights) for _ in range(2))
    known = reference.tokenizer
    with serving(served, tokenizer=served.tokenizer) as url:
        for n in (1, 8):
            sampling = {"temperature": 0.9, "top_p": 0.95, "min_p": 0.01, "seed": 5}
            many = {**sampling, "n": n, "max_tokens": 12, "return_token_ids": True, "logprobs": 3}

            def drawn(ids: list[int], id: str = "", n: int = n) -> Group:
                request = Request(ids, n=n, max_tokens=12, top_logprobs=3, id=id, **sampling)
                return reference.generate([request])[0]

            ids = prompt(n)
            group = drawn(ids, "the id")
            asked = {**many, "prompt": ids, "request_id": "the id"}
            choices = answer(url, COMPLETIONS, asked)["choices"]
            for sample, (rollout, choice) in enumerate(zip(group.rollouts, choices, strict=True)):
                assert told(choice) == (rollout.token_ids, rollout.logprobs)
                assert choice["lowroll"]["behavior"] == as_json(rollout)
                assert choice["lowroll"]["logprobs"] == rollout.logprobs
                assert choice["index"] == sample and choice["prompt_token_ids"] == ids
                assert choice["text"] == reference.text(rollout)

            bare = {k: v for k, v in many.items() if k != "logprobs"} | {"packed": True}
            group = drawn(prompt(n + 300))
            choices = answer(url, COMPLETIONS, {**bare, "prompt": prompt(n + 300)})["choices"]
            for rollout, choice in zip(group.rollouts, choices, strict=True):
                assert unpack(choice["packed"]) == (rollout.token_ids, rollout.logprobs)
                assert choice["lowroll"]["behavior"] == as_json(rollout)
                assert choice.keys().isdisjoint({"token_ids", "logprobs"}) and not choice["text"]
            group = drawn(prompt(n + 400))
            parts = events(url + COMPLETIONS, {**bare, "prompt": prompt(n + 400)})
            for sample, rollout in enumerate(group.rollouts):
                assert unpacked(parts, sample) == (rollout.token_ids, rollout.logprobs)
                assert parts[-1]["lowroll"][sample]["behavior"] == as_json(rollout)

            text = known.decode(prompt(n + 100))
            group = drawn(known.encode(text))
            parts = events(url + COMPLETIONS, {**many, "prompt": text})
            for sample, rollout in enumerate(group.rollouts):
                told_ids, told_logprobs, said, _ = joined(parts, sample)
                assert (told_ids, told_logprobs) == (rollout.token_ids, rollout.logprobs)
                assert said == reference.text(rollout)
                assert parts[-1]["lowroll"][sample]["behavior"] == as_json(rollout)
                assert parts[-1]["lowroll"][sample]["logprobs"] == rollout.logprobs

            ids = prompt(n + 200)
            group = drawn(ids, "x")
            asked = {"token_ids": ids, "request_id": "x", "sampling_params": {**sampling, "n": n}}
            asked["sampling_params"] |= {"max_tokens": 12, "logprobs": 3}
            for rollout, choice in zip(
                group.rollouts, answer(url, GENERATE, asked)["choices"], strict=True
            ):
                contents = choice["logprobs"]["content"]
                assert choice["token_ids"] == rollout.token_ids
                assert [c["logprob"] for c in contents] == rollout.logprobs
                assert [c["token"] for c in contents] == [
                    f"token_id:{i}" for i in rollout.token_ids
                ]
                assert [c["token_id"] for c in contents] == rollout.token_ids
                assert rollout.top_logprobs is not None
                assert [
                    [(t["token"], t["logprob"]) for t in c["top_logprobs"]] for c in contents
                ] == [[(f"token_id:{i}", p) for i, p in top] for top in rollout.top_logprobs]

            messages = [{"role": "user", "content": f"say {n}"}]
            ids = answer(url, "/tokenize", {"messages": messages})["tokens"]
            group = drawn(ids)
            asked = {**many, "messages": messages, "logprobs": True, "top_logprobs": 3}
            tree = answer(url, CHAT, asked)
            assert tree["prompt_token_ids"] == ids
            for rollout, choice in zip(group.rollouts, tree["choices"], strict=True):
                assert choice["token_ids"] == rollout.token_ids
                contents = choice["logprobs"]["content"]
                assert [c["logprob"] for c in contents] == rollout.logprobs
                assert choice["message"] == {
                    "role": "assistant",
                    "content": reference.text(rollout),
                }


@pytest.mark.slow
def test_prompts_at_once_are_answered_in_order(url: str, reference: Engine) -> None:
    prompts = [prompt(seed, 9) for seed in range(300, 320)]
    tree = answer(
        url,
        COMPLETIONS,
        {"prompt": prompts, "n": 3, "max_tokens": 4, "seed": 9, "return_token_ids": True},
    )
    groups = reference.generate([Request(ids, n=3, max_tokens=4, seed=9) for ids in prompts])
    assert [c["index"] for c in tree["choices"]] == list(range(60))
    assert [c["token_ids"] for c in tree["choices"]] == [
        rollout.token_ids for group in groups for rollout in group.rollouts
    ]
    assert [c["prompt_token_ids"] for c in tree["choices"][::3]] == prompts
    assert tree["usage"] == {
        "prompt_tokens": 180,
        "completion_tokens": sum(len(r.token_ids) for g in groups for r in g.rollouts),
        "total_tokens": 180 + sum(len(r.token_ids) for g in groups for r in g.rollouts),
    }


def test_without_a_seed_answers_differ(url: str) -> None:
    asked = {"prompt": prompt(1), "max_tokens": 12, "return_token_ids": True}
    first, second = (answer(url, COMPLETIONS, asked)["choices"][0] for _ in range(2))
    assert first["token_ids"] != second["token_ids"]
    assert first["lowroll"]["behavior"]["seed"] != second["lowroll"]["behavior"]["seed"]


# -- scoring ---------------------------------------------------------------------------------------


def test_a_prompt_alone_is_scored(url: str, reference: Engine) -> None:
    ids = prompt(400, 12)
    (ranked,) = reference.score_top([ids], [1], 4)
    asked = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 2, "prompt_logprobs": 4}
    tree = answer(url, COMPLETIONS, {**asked, "return_tokens_as_token_ids": True})
    (choice,) = tree["choices"]
    told = choice["logprobs"]
    assert choice["text"] == reference.tokenizer.decode(ids)
    assert told["tokens"] == [f"token_id:{i}" for i in ids]
    assert told["token_logprobs"] == [None, *ranked.logprobs_T.tolist()]
    assert told["top_logprobs"][0] is None
    assert all(len(top) in (2, 3) for top in told["top_logprobs"][1:])
    places = choice["prompt_logprobs"]
    assert places[0] is None and len(places) == 12
    for i, place in enumerate(places[1:]):
        top = dict(
            zip(ranked.top_ids_TK[i].tolist(), ranked.top_logprobs_TK[i].tolist(), strict=True)
        )
        assert {int(k): v["logprob"] for k, v in place.items()} == {
            **top,
            ids[i + 1]: ranked.logprobs_T[i].item(),
        }
        assert [place[str(k)]["rank"] for k in top] == [1, 2, 3, 4]
        assert place[str(ids[i + 1])]["rank"] is None or ids[i + 1] in top
    assert tree["usage"] == {"prompt_tokens": 12, "completion_tokens": 0, "total_tokens": 12}
    assert choice["finish_reason"] == "length"
    (fewer,) = answer(url, COMPLETIONS, asked | {"logprobs": 3, "prompt_logprobs": 1})["choices"]
    for one, place in zip(fewer["prompt_logprobs"][1:], places[1:], strict=True):
        assert len(one) in (1, 2)
        assert all(told["logprob"] == place[token]["logprob"] for token, told in one.items())


def test_scores_have_a_temperature_of_their_own(url: str, reference: Engine) -> None:
    ids = prompt(401)
    asked = {"prompt": ids, "max_tokens": 0, "prompt_logprobs": 0, "temperature": 0}
    for temperature in (1.0, 0.5):
        tree = answer(url, COMPLETIONS, asked | {"score_temperature": temperature})
        places = tree["choices"][0]["prompt_logprobs"][1:]
        (scores,) = reference.score([ids], [1], temperature)
        assert [place[str(i)]["logprob"] for place, i in zip(places, ids[1:], strict=True)] == (
            scores.tolist()
        )


def test_an_echo_with_an_answer_has_both(url: str, reference: Engine) -> None:
    """As lm-eval's local-completions asks."""
    ids = [prompt(402), prompt(403)]
    asked = {"prompt": ids, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    tree = answer(url, COMPLETIONS, asked | {"echo": True})
    for choice, one in zip(tree["choices"], ids, strict=True):
        (ranked,) = reference.score_top([one], [1], 1)
        assert choice["logprobs"]["token_logprobs"][1:-1] == ranked.logprobs_T.tolist()
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:-1]]
        assert best == [
            max(a, b)
            for a, b in zip(
                ranked.top_logprobs_TK[:, 0].tolist(), ranked.logprobs_T.tolist(), strict=True
            )
        ]
        assert len(choice["logprobs"]["tokens"]) == 8 == len(choice["logprobs"]["text_offset"])
        assert choice["text"].startswith(reference.tokenizer.decode(one))


def test_a_prompt_of_one_token_has_no_scores(url: str) -> None:
    asked = {"prompt": [70], "max_tokens": 0, "prompt_logprobs": 3, "echo": True, "logprobs": 1}
    (choice,) = answer(url, COMPLETIONS, asked)["choices"]
    assert choice["prompt_logprobs"] == [None] and choice["logprobs"]["token_logprobs"] == [None]


# -- text, stops, ends -----------------------------------------------------------------------------


def test_offsets_say_where_tokens_begin(url: str) -> None:
    asked = {"prompt": "naïve 日本", "echo": True, "max_tokens": 24, "logprobs": 0, "seed": 3}
    (choice,) = answer(url, COMPLETIONS, asked)["choices"]
    told, text = choice["logprobs"], choice["text"]
    assert len(told["text_offset"]) == len(told["tokens"]) > 24
    assert told["text_offset"] == sorted(told["text_offset"])
    for at, token in zip(told["text_offset"], told["tokens"], strict=True):
        if token.isascii() and not token.startswith("<|"):
            assert text[at : at + 1] in (token, "\ufffd")  # an unfinished one ends here
    parts = events(url + COMPLETIONS, asked)
    offsets = [at for p in parts for at in p["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == told["text_offset"]
    assert "".join(p["choices"][0]["text"] for p in parts) == text


@pytest.mark.parametrize("n", [1, 8])
def test_a_stop_string_ends_the_text(url: str, reference: Engine, n: int) -> None:
    asked = {"prompt": prompt(500 + n), "n": n, "max_tokens": 40, "seed": 2}
    free = answer(url, COMPLETIONS, asked)["choices"]
    text = next(c["text"] for c in free if len(c["text"]) > 12)
    stop = [text[6:8], "never"]
    cut = answer(url, COMPLETIONS, asked | {"stop": stop})["choices"]
    parts = events(url + COMPLETIONS, asked | {"stop": stop})
    ended = 0
    for before, choice in zip(free, cut, strict=True):
        mine = [c for p in parts for c in p["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        assert choice["text"] == before["text"].partition(stop[0])[0]
        if choice["stop_reason"] == stop[0]:
            assert choice["finish_reason"] == "stop"
            ended += 1
    assert ended >= 1
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "seed": 1}
    said = answer(url, CHAT, chat)["choices"][0]["message"]["content"]
    again = answer(url, CHAT, chat | {"stop": said[3:5]})["choices"][0]
    assert again["message"]["content"] == said.partition(said[3:5])[0]


def test_a_stop_id_ends_the_text_and_is_a_token(url: str) -> None:
    asked = {"prompt": prompt(510), "max_tokens": 20, "seed": 4, "return_token_ids": True}
    ids = answer(url, COMPLETIONS, asked)["choices"][0]["token_ids"]
    (choice,) = answer(url, COMPLETIONS, asked | {"stop_token_ids": [ids[5]]})["choices"]
    at = ids.index(ids[5]) + 1
    assert choice["token_ids"] == ids[:at]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[5])
    _, tree = post(url + "/detokenize", {"tokens": ids[: at - 1]})
    assert choice["text"] == tree["prompt"]


def test_the_stream_ends_with_usage_when_asked(url: str) -> None:
    asked = {"prompt": [prompt(1), prompt(2)], "n": 2, "max_tokens": 5, "ignore_eos": True}
    *parts, last = events(url + COMPLETIONS, asked | {"stream_options": {"include_usage": True}})
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 14, "completion_tokens": 20, "total_tokens": 34}
    assert all(part["usage"] is None for part in parts)
    assert {c["index"] for part in parts for c in part["choices"]} == {0, 1, 2, 3}
    assert all("usage" not in part for part in events(url + COMPLETIONS, asked))


def test_a_streamed_conversation_begins_with_the_role(url: str) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 3, "n": 2}
    parts = events(url + CHAT, asked)
    whole = answer(url, CHAT, asked)
    for choice in whole["choices"]:
        mine = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        said = "".join(c["delta"].get("content", "") for c in mine)
        assert said == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    assert {p["object"] for p in parts} == {"chat.completion.chunk"}
    assert len({p["id"] for p in parts}) == 1


def test_text_parts_are_lines_of_a_message(url: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    split = answer(url, "/tokenize", {"messages": [{"role": "user", "content": parts}]})
    assert split == answer(url, "/tokenize", {"messages": [{"role": "user", "content": "a\nb"}]})


def test_lengths_have_defaults(url: str) -> None:
    asked = {"ignore_eos": True, "seed": 1}
    assert answer(url, COMPLETIONS, {"prompt": "a", **asked})["usage"]["completion_tokens"] == 16
    near = answer(url, COMPLETIONS, {"prompt": "a" * 250, **asked})
    assert near["usage"] == {"prompt_tokens": 250, "completion_tokens": 6, "total_tokens": 256}
    chat = answer(url, CHAT, {"messages": [{"role": "user", "content": "a" * 200}], **asked})
    assert chat["usage"]["total_tokens"] == 256
    trainer = answer(url, GENERATE, {"token_ids": [9] * 250, "sampling_params": asked})
    assert trainer["usage"]["total_tokens"] == 256


def test_texts_become_tokens_and_back(url: str, engine: Engine) -> None:
    ids = engine.tokenizer.encode("naïve 日本")
    tree = answer(url, "/tokenize", {"prompt": "naïve 日本", "return_token_strs": True})
    assert (tree["tokens"], tree["count"], tree["max_model_len"]) == (ids, len(ids), 256)
    assert tree["token_strs"][:2] == ["n", "a"]
    assert answer(url, "/detokenize", {"tokens": ids}) == {"prompt": "naïve 日本"}
    special = [engine.tokenizer.eos_token_id, *ids[:1]]
    assert answer(url, "/detokenize", {"tokens": special}) == {"prompt": "<|end|>n"}


def test_the_model_is_listed(url: str, engine: Engine) -> None:
    status, tree = get(url + "/v1/models")
    (model,) = tree["data"]
    assert (status, model["id"], model["max_model_len"]) == (200, NAME, 256)
    assert model["lowroll"]["behavior"]["policy"][0]["digest"] == engine.behavior.policy[0].digest
    assert set(model["lowroll"]["capabilities"]["sampler"]) == engine.capabilities.sampler


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (COMPLETIONS, {"prompt": []}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [70, 9999]}, "prompt[1]", "0..260"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt[0]", "-1"),
        (COMPLETIONS, {"prompt": [[70], [71, 9999]]}, "prompt[1][1]", "0..260"),
        (COMPLETIONS, {"prompt": [[70], [9999]], "prompt_logprobs": 1}, "prompt[1][0]", ""),
        (COMPLETIONS, {"prompt": "a" * 300, "prompt_logprobs": 1}, "prompt", "context of 256"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 300}, "max_tokens", "context of 256"),
        (COMPLETIONS, {"prompt": "a" * 300}, "max_tokens", "context of 256"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens", "at least 1"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0, "echo": True, "n": 2}, "n", "2"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0, "echo": True, "stream": True}, "stream", ""),
        (COMPLETIONS, {"prompt": "a", "n": 65}, "n", "64 at most"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "1.."),
        (COMPLETIONS, {"prompt": "a", "best_of": 4}, "best_of", "n 1"),
        (COMPLETIONS, {"prompt": "a", "packed": True}, "packed", "return_token_ids"),
        *(
            (COMPLETIONS, PACKED | {other: value}, "packed", other)
            for other, value in (("echo", True), ("logprobs", 0), ("prompt_logprobs", 1))
        ),
        (COMPLETIONS, {"prompt": [[70]] * 257}, "prompt", "256 at most"),
        (COMPLETIONS, {"prompt": ["a", "b"], "request_id": "x"}, "request_id", "2 prompts"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "0 for greedy"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "(0, 1]"),
        (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k", "at least 0"),
        (COMPLETIONS, {"prompt": "a", "seed": -1}, "seed", ""),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop[0]", "not empty"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids[0]", "0..260"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options", "stream"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 300}]}, "max_tokens", "256"),
        (CHAT, SAID | {"max_completion_tokens": 999}, "max_completion_tokens", "256"),
        (CHAT, SAID | {"max_completion_tokens": 9, "max_tokens": 8}, "max_tokens", "9"),
        (CHAT, SAID | {"top_logprobs": 1}, "top_logprobs", ""),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x" * 5000}], "prompt_logprobs": 0},
            "messages",
            "context",
        ),
        (COMPLETIONS, {"prompt": [[7, 8], [7, 10**6]]} | SCORED, "prompt[1]", "vocabulary"),
        (GENERATE, {"token_ids": []}, "token_ids", "empty"),
        (GENERATE, {"token_ids": [9999]}, "token_ids[0]", "0..260"),
        *(
            (GENERATE, {"token_ids": ids, "sampling_params": params}, param, says)
            for ids, params, param, says in (
                ([70], {"top_p": 2}, "sampling_params.top_p", "(0, 1]"),
                ([], {"prompt_logprobs": 0}, "token_ids", "empty"),
                ([7] * 5000, {"prompt_logprobs": 0}, "token_ids", "context"),
                ([70], {"stop": [""]}, "sampling_params.stop[0]", ""),
            )
        ),
        ("/tokenize", {}, "prompt", "one of the two"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", ""),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]", ""),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_named(
    url: str, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    status, named, message = refusal(url, path, body)
    assert (status, named) == (400, param), message
    assert message.startswith(f"{param}: ") and says in message


def test_another_model_is_not_here(url: str) -> None:
    status, tree = post(url + COMPLETIONS, {"model": "gpt-9", "prompt": "a"})
    assert status == 404 and tree["error"]["code"] == "model_not_found"
    assert tree["error"]["param"] == "model"


def test_a_model_without_a_template_completes_text(model: Path) -> None:
    engine = engine_of(model)
    known = engine.tokenizer
    template, known.chat_template = known.chat_template, None
    try:
        with serving(engine, tokenizer=known) as url:
            messages = {"messages": [{"role": "user", "content": "a"}]}
            for path in (CHAT, "/tokenize"):
                status, param, message = refusal(url, path, messages)
                assert (status, param) == (400, "messages") and "/v1/completions" in message
            assert answer(url, COMPLETIONS, {"prompt": "a"})["usage"]["completion_tokens"] > 0
    finally:
        known.chat_template = template


def test_a_model_without_a_tokenizer_takes_ids(model: Path) -> None:
    with serving(engine_of(model)) as url:
        asked = {"prompt": [70, 71], "max_tokens": 3, "logprobs": 1, "return_token_ids": True}
        (choice,) = answer(url, COMPLETIONS, {**asked, "ignore_eos": True})["choices"]
        assert choice["text"] == "" and len(choice["token_ids"]) == 3
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert refusal(url, COMPLETIONS, {"prompt": "a"})[1] == "prompt"
        assert refusal(url, "/detokenize", {"tokens": [1]})[1] == "tokens"


def test_what_the_template_objects_to_is_the_clients(model: Path) -> None:
    engine = engine_of(model)
    known = engine.tokenizer
    template = known.chat_template
    known.chat_template = "{{ raise_exception('no ' + messages[0].role) }}"
    try:
        with serving(engine, tokenizer=known) as url:
            body = {"messages": [{"role": "user", "content": "a"}]}
            status, param, message = refusal(url, CHAT, body)
            assert (status, param) == (400, "messages") and "no user" in message
            assert "/" not in message.removeprefix("messages")
    finally:
        known.chat_template = template
