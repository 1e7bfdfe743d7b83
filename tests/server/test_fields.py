"""Fields that clients of OpenAI's, vLLM's and SGLang's servers send, and routes that they ask."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest

from lowroll.runs.demo import build_tokenizer
from tests.fixtures.http import NAME, get, post, serving
from tests.fixtures.scripted import Scripted

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TEMPLATE = "{{ messages[0].content }}{% if not enable_thinking | default(true) %}quiet{% endif %}"


@pytest.fixture(scope="module")
def engine() -> Any:
    made = build_tokenizer()
    made.chat_template = TEMPLATE
    return Scripted(made, lambda prompt, n: f"{prompt}<|end|>")


@pytest.fixture(scope="module")
def url(engine: Any) -> Iterator[str]:
    with serving(engine, tokenizer=engine.tokenizer) as found:
        yield found


def test_variables_of_the_chat_template(url: str) -> None:
    def said(**more: Any) -> str:
        status, tree = post(url + CHAT, {"messages": HI, **more})
        assert status == 200, tree
        return str(tree["choices"][0]["message"]["content"])

    assert said() == said(chat_template_kwargs={"enable_thinking": True}) == "hi"
    assert said(chat_template_kwargs={"enable_thinking": False}) == "hiquiet"
    asked = {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}
    assert post(url + "/tokenize", asked)[1]["count"] == len("hiquiet")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"messages": []}, "messages"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"tools": []}, "tools"),
        ({"eos_token": ""}, "eos_token"),
        ([1], "chat_template_kwargs"),
    ],
)
def test_variables_that_are_not_a_client_s(url: str, given: object, named: str) -> None:
    status, tree = post(url + CHAT, {"messages": HI, "chat_template_kwargs": given})
    assert (status, tree["error"]["param"]) == (400, "chat_template_kwargs")
    assert named in tree["error"]["message"]


def test_one_model_by_its_name(url: str) -> None:
    status, tree = get(f"{url}/v1/models/{NAME}")
    assert (status, tree["id"], tree["object"]) == (200, NAME, "model")
    assert tree == get(f"{url}/v1/models")[1]["data"][0]
    for other in ("other", "an/other"):
        status, tree = get(f"{url}/v1/models/{other}")
        assert (status, tree["error"]["code"]) == (404, "model_not_found")


def test_what_only_grows_is_a_counter(url: str) -> None:
    with urlopen(f"{url}/metrics", timeout=30) as answer:  # noqa: S310 - http
        text = answer.read().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    engine_counters = (
        "prefix_hit_pages drawn_tokens replayed_samples replayed_tokens replay_kept_tokens"
    )
    for name in engine_counters.split():
        assert kinds.get(f"lowroll_{name}_total") == "counter", kinds
        assert re.search(rf"^lowroll_{name}_total 0", text, re.M)
        assert f"lowroll_{name}" not in kinds


def test_penalties_and_biases_reach_the_engine(url: str, engine: Any) -> None:
    asked = {"presence_penalty": 1, "frequency_penalty": -0.5, "logit_bias": {"7": -100}}
    assert post(url + CHAT, {"messages": HI, **asked})[0] == 200
    request = engine.requests[-1]
    assert (request.presence_penalty, request.frequency_penalty) == (1.0, -0.5)
    assert request.logit_bias == ((7, -100.0),)
    assert post(url + CHAT, {"messages": HI, "presence_penalty": 0})[0] == 200
    assert engine.requests[-1].presence_penalty is None
    status, tree = post(url + CHAT, {"messages": HI, "logit_bias": {"x": 1}})
    assert (status, tree["error"]["param"]) == (400, "logit_bias")
