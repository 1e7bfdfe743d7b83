"""Calibration text as token ids for `weights.awq`, `weights.gptq` and `weights.format_search`, and
a run's first requests.

A `.jsonl` file has a document a line, `{"text": "..."}` or `{"messages": [...]}`, or is of `lowroll
eval` or a run. Other files are plain text, cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from lowroll.config import RunConfig
from lowroll.envs.data.files import read_jsonl
from lowroll.model.spec import ModelSpec
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.orchestrator.prompt_source import draw_at
from lowroll.runs.assembly import environments, orchestrator, prompts
from lowroll.types import Request

_CHARACTERS_PER_TOKEN = 32  # bounds the plain text that is read


def calibration_sequences(
    path: str | Path,
    tokenizer: Any,
    num_samples: int = 128,
    length: int = 512,
) -> list[list[int]]:
    """Return at most `num_samples` sequences of at most `length` token ids. ValueError names the
    file, and a line without text."""
    path = Path(path)
    for name, value in (("calibration samples", num_samples), ("calibration length", length)):
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, is {value}")
    if not path.is_file():
        raise ValueError(f"calibration: {path}: no such file")
    if path.suffix == ".jsonl":
        candidates = _sequences_from_jsonl(path, tokenizer, length)
    else:
        candidates = _sequences_from_text(
            path, tokenizer, length, num_samples * length * _CHARACTERS_PER_TOKEN
        )
    sequences = list(islice((ids for ids in candidates if ids), num_samples))
    if not sequences:
        raise ValueError(f"calibration: {path}: no text in it")
    return sequences


def _sequences_from_jsonl(path: Path, tokenizer: Any, length: int) -> Iterator[list[int]]:
    for location, row in read_jsonl(str(path)):
        text, messages = row.get("text"), row.get("messages")
        conversations = _conversations_in(row)
        if conversations is None:  # the user's own document
            if isinstance(text, str):
                yield tokenizer.encode(text)[:length]
                continue
            if not isinstance(messages, list) or not messages:
                raise ValueError(
                    f"calibration: {location}: expected a 'text' or a list of 'messages', found "
                    f"{', '.join(sorted(row)) or 'nothing'}"
                )
            conversations = [messages]
        for conversation in conversations:
            try:
                yield ChatTokenizer(tokenizer).encode_chat(conversation, open_turn=False)[:length]
            # ValueError is the template's, AttributeError of messages that are not objects
            except (ValueError, AttributeError) as error:
                raise ValueError(
                    f"calibration: {location}: messages: the chat template refuses them ({error})"
                ) from error


def _conversations_in(row: dict[str, Any]) -> list[list[Any]] | None:
    if row.get("kind") in ("asked", "scored", "batch"):
        return []
    prompt, responses = row.get("prompt"), row.get("responses")
    if isinstance(responses, list) and isinstance(row.get("messages"), list):
        prompt_messages = row["messages"]  # of `lowroll eval`: all responses to an example
    elif isinstance(prompt, dict) and isinstance(prompt.get("messages"), list):
        prompt_messages, responses = prompt["messages"], [row]  # of a run: a line is a sample
    else:
        return None
    conversations = []
    for response in responses:
        if isinstance(response, dict):
            answer = {"role": "assistant", "content": response.get("text", "")}
            response_messages = response.get("messages") or [answer]  # several after tool calls
            conversations.append([*prompt_messages, *response_messages])
    return conversations


def _sequences_from_text(
    path: Path, tokenizer: Any, length: int, characters: int
) -> Iterator[list[int]]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(characters)
    except UnicodeDecodeError as error:
        raise ValueError(f"calibration: {path}: not UTF-8 text ({error})") from None
    ids = tokenizer.encode(text)
    yield from (ids[start : start + length] for start in range(0, len(ids), length))


def first_requests(
    cfg: RunConfig,
    spec: ModelSpec,
    chat: ChatTokenizer,
    texts: Sequence[str],
    num_prompts: int,
    n: int,
) -> list[Request]:
    """Return requests of `n` responses each to `texts`, else to the run's first `num_prompts`
    prompts that fit. The sampler is not truncated: log-probs are of the whole distribution."""
    run_sampling = orchestrator.sampling(cfg)
    sampling = replace(
        run_sampling, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, min_tokens=0
    )
    if texts:
        return [
            Request(
                chat.encode_chat([{"role": "user", "content": text}]),
                n=n,
                seed=cfg.seed,
                id=f"prompt/{i}",
                **vars(sampling),
            )
            for i, text in enumerate(texts)
        ]
    envs = list(environments.make(cfg.env, cfg.seed).values())
    max_prompt_tokens = prompts.longest(cfg, spec)
    requests = []
    for i in range(num_prompts):
        env, position = envs[i % len(envs)], i // len(envs)
        draw = draw_at(env, env.name, position, "train", chat, sampling, n, cfg.seed)
        if len(draw.request.prompt_ids) <= max_prompt_tokens:
            requests.append(draw.request)
    return requests
