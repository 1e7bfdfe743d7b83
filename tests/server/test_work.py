"""What clients ask of the server's own hands is bounded, and done beside the event loop."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lowroll.runs.demo import build_tokenizer
from lowroll.server import streaming
from lowroll.server.limits import ServerLimits
from lowroll.server.protocol import ChatRequest, Refused, Tool, parse_request
from lowroll.server.structured_outputs import check_tool_names
from lowroll.server.text import Vocabulary
from tests.fixtures.engines import engine_of
from tests.fixtures.hermes import TEMPLATE
from tests.fixtures.http import NAME, get, post, serving
from tests.fixtures.scripted import Scripted

HI = [{"role": "user", "content": "hi"}]


def tokenizer(template: str = TEMPLATE) -> Any:
    made = build_tokenizer()
    made.chat_template = template
    return made


def scripted(made: Any) -> Any:
    return Scripted(made, lambda prompt, n: "ok<|end|>")


class CountedName(str):
    """A name that counts how often it is compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_two_tools_with_one_name_are_found_in_one_pass() -> None:
    names = [CountedName(f"tool {i}") for i in range(2000)]
    tools = [Tool.model_validate({"type": "function", "function": {"name": "a"}}) for _ in names]
    for tool, name in zip(tools, names, strict=True):
        tool.function.name = name
    CountedName.compared = 0
    check_tool_names(tools)
    assert CountedName.compared < 4 * len(names)
    tools[1500].function.name = CountedName("tool 3")
    with pytest.raises(Refused, match=r"tools\[1500\].function.name: two tools"):
        check_tool_names(tools)


def test_tools_are_not_looked_at_by_a_model_that_takes_none() -> None:
    made = tokenizer("{{ messages[0].content }}")
    twice = [{"type": "function", "function": {"name": "a"}}] * 2
    with serving(scripted(made), tokenizer=made) as url:
        status, tree = post(url + "/v1/chat/completions", {"messages": HI, "tools": twice})
    assert (status, tree["error"]["param"]) == (400, "tools")


def test_more_tools_than_may_be_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": f"t{i}"}} for i in range(2049)]
    with pytest.raises(Refused, match="tools: "):
        parse_request({"messages": HI, "tools": tools}, ChatRequest)


def count_encoded(made: Any) -> list[int]:
    """The characters of each text that the tokenizer gets."""
    seen: list[int] = []
    encode = Vocabulary.encode

    def counting(self: Vocabulary, text: str, *more: Any) -> list[int]:
        seen.append(len(text))
        return encode(self, text, *more)

    made.setattr(Vocabulary, "encode", counting)
    return seen


def test_a_text_that_cannot_fit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer()
    longest = max(len(word) for word in made.get_vocab())
    most = 4096 * longest
    seen = count_encoded(monkeypatch)
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": "a" * (most + 1)}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "a" * (most + 1)]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [HI[0] | {"content": "a" * most}]}, "messages"),
        ("/tokenize", {"prompt": "a" * (1 << 20) + "a"}, "prompt"),
    ]
    with serving(scripted(made), tokenizer=made) as url:
        for path, body, param in asked:
            status, tree = post(url + path, body)
            error = tree["error"]
            assert (status, error["param"]) == (400, param), error
            assert error["code"] == "context_length_exceeded"
        assert max(seen, default=0) <= 1
        status, tree = post(url + "/tokenize", {"prompt": "a" * 5000})
        assert status == 200 and tree["count"] == 5000


def test_the_longest_token_is_known_only_where_it_is_certain() -> None:
    plain = Vocabulary(tokenizer())
    assert plain.fewest_tokens("é" * 1000) * plain.longest >= 2000  # bytes, not characters
    greedy = tokenizer()
    from tokenizers import AddedToken

    greedy.add_tokens([AddedToken("<eats spaces>", lstrip=True)])
    assert Vocabulary(greedy).fewest_tokens(" " * 100_000 + "<eats spaces>") == 0


def test_the_server_answers_while_a_tokenizer_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts at a time, whatever is asked, and the loop is free."""
    made = tokenizer()
    go, begun, at_once, most = threading.Event(), threading.Semaphore(0), 0, 0
    lock = threading.Lock()

    def slow(self: Vocabulary, text: str, *more: Any) -> list[int]:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        begun.release()
        assert go.wait(30)
        with lock:
            at_once -= 1
        return [1]

    monkeypatch.setattr(Vocabulary, "encode", slow)
    with serving(scripted(made), tokenizer=made) as url, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(post, url + "/tokenize", {"prompt": "a"}) for _ in range(8)]
        try:
            assert begun.acquire(timeout=30) and begun.acquire(timeout=30)
            assert get(url + "/health")[0] == 200
            assert not any(one.done() for one in asked)
        finally:
            go.set()
        assert [one.result(30)[0] for one in asked] == [200] * 8
    assert most == 2


def test_bodies_that_are_held_together_are_bounded() -> None:
    made = tokenizer()
    limits = ServerLimits(bodies=200_000)
    gate, begun = threading.Event(), threading.Semaphore(0)
    engine = scripted(made)
    say = engine.say

    def waits(prompt: str, n: int) -> str:
        begun.release()
        assert gate.wait(30)
        return str(say(prompt, n))

    engine.say = waits
    large = {"prompt": "a", "user": "x" * 150_000}
    with serving(engine, tokenizer=made, limits=limits) as url, ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, url + "/v1/completions", large)
        try:
            assert begun.acquire(timeout=30)
            status, tree = post(url + "/v1/completions", large)
            assert (status, tree["error"]["code"]) == (503, "busy")
        finally:
            gate.set()
        assert first.result(30)[0] == 200
        assert post(url + "/v1/completions", large)[0] == 200  # what was held is given back


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_log_probs_of_prompts_are_bounded_together(model: Path, path: str) -> None:
    """Places times tokens told at each, of all prompts."""
    engine = engine_of(model)
    made = engine.tokenizer
    limits = ServerLimits(told=100)
    talk: dict[str, Any] = {"prompt": [[5] * 10] * 4, "max_tokens": 0}
    if path.endswith("chat/completions"):
        talk = {"messages": [{"role": "user", "content": "a" * 30}], "max_tokens": 1}
    with serving(engine, tokenizer=made, limits=limits) as url:
        status, tree = post(url + path, {"model": NAME, **talk, "prompt_logprobs": 5})
        assert (status, tree["error"]["param"]) == (400, "prompt_logprobs"), tree
        status, tree = post(url + path, {"model": NAME, **talk, "prompt_logprobs": 0})
        assert status == 200, tree


def test_a_large_answer_is_written_beside_the_loop(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model)
    writers: list[str] = []
    compact = streaming.compact_json

    def noting(tree: Any) -> str:
        writers.append(threading.current_thread().name)
        return compact(tree)

    monkeypatch.setattr(streaming, "compact_json", noting)
    monkeypatch.setattr(streaming, "SHORT_ANSWER", 20)
    with serving(engine, tokenizer=engine.tokenizer) as url:
        asked = {"prompt": [5] * 30, "max_tokens": 0, "prompt_logprobs": 1}
        status, tree = post(url + "/v1/completions", asked)
        assert status == 200 and len(json.dumps(tree)) > 100
    assert writers and all(name.startswith("clients") for name in writers)
