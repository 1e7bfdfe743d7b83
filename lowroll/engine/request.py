"""Checks of a request, and its noise key.

`noise_key` is the reproducibility contract: key = blake2b-64(seed, id, sample), where an empty id
stands for the prompt. The token at position t is drawn from Philox(key, t), in any batch, after a
restart, and when a partial rollout (with its id set) is continued.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Any

from lowroll.kv.policy.base import CachePolicy, footprint
from lowroll.kv.policy.dense import DENSE
from lowroll.types import (
    BIASES,
    COUNTED,
    MAX_BIASES,
    MAX_SAMPLES,
    MAX_TOP_LOGPROBS,
    PENALTIES,
    TEMPERATURES,
    Request,
)

MAX_SEED = 2**63 - 1


def validate(
    request: Request,
    *,
    vocab_size: int,
    context_length: int,
    cache_tokens: int,
    has_tokenizer: bool = False,
    kv: CachePolicy = DENSE,
    page_size: int = 1,
    eos_ids: Collection[int] = (),
) -> None:
    """Raise ValueError naming the first wrong field.

    context_length, cache_tokens: in tokens. kv: may bound a sample's share of the cache. eos_ids:
    the model's own stops.
    """
    _check_ids("prompt_ids", request.prompt_ids, vocab_size)
    if not request.prompt_ids:
        raise ValueError("prompt_ids: the prompt is empty")
    _check_int("n", request.n, 1, MAX_SAMPLES)
    _check_int("max_tokens", request.max_tokens, 1, None)
    _check_int("min_tokens", request.min_tokens, 0, None)
    if request.min_tokens > request.max_tokens:
        raise ValueError(
            f"min_tokens: {request.min_tokens} is more than max_tokens {request.max_tokens}"
        )
    _check_length(request, context_length)
    _check_cache_size(request, cache_tokens, kv, page_size)
    if _check_float("temperature", request.temperature) != 0:
        _check_range("temperature", request.temperature, *TEMPERATURES, hint=" or 0 for greedy")
    _check_int("top_k", request.top_k, 0, None)
    if not 0 < _check_float("top_p", request.top_p) <= 1:
        raise ValueError(f"top_p: expected a number in (0, 1], got {_show(request.top_p)}")
    if not 0 <= _check_float("min_p", request.min_p) < 1:
        raise ValueError(f"min_p: expected a number in [0, 1), got {_show(request.min_p)}")
    _check_float("repetition_penalty", request.repetition_penalty)
    _check_range("repetition_penalty", request.repetition_penalty, *PENALTIES)
    for name in ("presence_penalty", "frequency_penalty"):
        if (value := getattr(request, name)) is not None:
            _check_range(name, _check_float(name, value), *COUNTED)
    _check_bias(request.logit_bias, vocab_size)
    _check_grammar(request, has_tokenizer)
    _check_ids("stop_ids", request.stop_ids, vocab_size)
    _check_stop_strings(request.stop_strings, has_tokenizer)
    if type(request.ignore_eos) is not bool:
        raise ValueError(f"ignore_eos: expected true or false, got {_show(request.ignore_eos)}")
    _check_drawable(request, vocab_size, () if request.ignore_eos else eos_ids)
    _check_int("seed", request.seed, 0, MAX_SEED)
    if type(request.id) is not str:
        raise ValueError(f"id: expected a string, got {_show(request.id)}")
    _check_int("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)


def check_sequences(
    sequences: Sequence[list[int]], prompt_lens: Sequence[int], longest: int, vocab_size: int
) -> None:
    """Raise ValueError for a sequence that cannot be scored in a context of `longest`."""
    for i, (ids, prompt_len) in enumerate(zip(sequences, prompt_lens, strict=True)):
        if not 1 <= prompt_len < len(ids) or len(ids) > longest:
            raise ValueError(
                f"sequences[{i}]: {len(ids)} tokens with a prompt of {prompt_len} cannot be "
                f"scored in a context of {longest}"
            )
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise ValueError(f"sequences[{i}]: an id is outside the vocabulary of {vocab_size}")


def noise_key(request: Request, sample: int) -> int:
    digest = blake2b(digest_size=8)
    digest.update(request.seed.to_bytes(8, "little") + sample.to_bytes(4, "little"))
    if request.id:
        digest.update(b"id" + request.id.encode("utf-8", "surrogatepass"))
    else:
        digest.update(b"prompt" + array("q", request.prompt_ids).tobytes())
    return int.from_bytes(digest.digest(), "little")


def sampler_settings(request: Request) -> dict[str, float]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens")
    settings = {name: float(getattr(request, name)) for name in names}
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(request, name):
            settings[name] = float(value)
    if request.grammar is not None:
        settings["grammar"] = 1.0
    return settings | {f"logit_bias.{token}": bias for token, bias in request.logit_bias or ()}


def _check_length(request: Request, context_length: int) -> None:
    total = len(request.prompt_ids) + request.max_tokens
    if total > context_length:
        raise ValueError(
            f"{_describe_length(request)} = {total} is over the model's context of {context_length} tokens"
        )


def _check_cache_size(request: Request, cache_tokens: int, kv: CachePolicy, page_size: int) -> None:
    total = len(request.prompt_ids) + request.max_tokens
    page_needs = footprint(kv, len(request.prompt_ids), request.max_tokens, page_size)
    if not (page_needs.evicts or page_needs.compacted):
        if total > cache_tokens:
            raise ValueError(
                f"{_describe_length(request)} = {total} is over the KV cache of {cache_tokens} tokens"
            )
    elif page_needs.alone * page_size > cache_tokens:
        raise ValueError(
            f"{_describe_length(request)} take {page_needs.alone * page_size} tokens of the cache under kv "
            f"{kv.name!r}, which is over the KV cache of {cache_tokens} tokens"
        )


def _describe_length(request: Request) -> str:
    return f"max_tokens: {len(request.prompt_ids)} prompt tokens + max_tokens {request.max_tokens}"


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    if not isinstance(ids, list | tuple):
        raise ValueError(f"{name}: expected a list of token ids, got {_show(ids)}")
    if (
        set(map(type, ids)) <= {int}
        and 0 <= min(ids, default=0) <= max(ids, default=0) < vocab_size
    ):
        return
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:  # excludes bool
            raise ValueError(
                f"{name}[{i}]: expected an integer in 0..{vocab_size - 1}, got {_show(token)}"
            )


def _check_drawable(request: Request, vocab_size: int, eos_ids: Collection[int]) -> None:
    """Raise ValueError when no token can be drawn, which would fail the whole step."""
    max_stops = len(request.stop_ids) + len(eos_ids)
    if request.min_tokens and max_stops >= vocab_size <= len({*request.stop_ids, *eos_ids}):
        raise ValueError(
            f"stop_ids: every token is a stop, so none can be drawn within min_tokens "
            f"{request.min_tokens}; leave one out, or set min_tokens to 0"
        )


def _check_bias(bias: Any, vocab_size: int) -> None:
    if bias is None:
        return
    if len(bias) > MAX_BIASES:
        raise ValueError(f"logit_bias: {len(bias)} tokens; {MAX_BIASES} at most")
    _check_ids("logit_bias", [token for token, _ in bias], vocab_size)
    for token, value in bias:
        _check_range(f"logit_bias[{token}]", _check_float(f"logit_bias[{token}]", value), *BIASES)


def _check_grammar(request: Request, has_tokenizer: bool) -> None:
    """Raise ValueError for settings that exclude a grammar, at whose end only an end token can
    follow."""
    if request.grammar is None:
        return
    if type(request.grammar) is not str:
        raise ValueError(f"grammar: expected a text, got {_show(request.grammar)}")
    if not has_tokenizer:
        raise ValueError("grammar: this engine has no tokenizer")
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise ValueError(f"{name}: it does not go with a grammar, which says where to end")


def _check_stop_strings(strings: Any, has_tokenizer: bool) -> None:
    if not isinstance(strings, list | tuple):
        raise ValueError(f"stop_strings: expected a list of strings, got {_show(strings)}")
    for i, text in enumerate(strings):
        if type(text) is not str or not text:
            raise ValueError(
                f"stop_strings[{i}]: expected a string that is not empty, got {_show(text)}"
            )
    if strings and not has_tokenizer:
        raise ValueError("stop_strings: this engine has no tokenizer; use stop_ids")


def _check_int(name: str, value: Any, low: int, high: int | None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name}: expected an integer {bounds}, got {_show(value)}")


def _check_float(name: str, value: Any) -> float:
    if type(value) not in (int, float):  # excludes bool; the range check refuses NaN
        raise ValueError(f"{name}: expected a number, got {_show(value)}")
    return value


def _check_range(name: str, value: float, low: float, high: float, hint: str = "") -> None:
    if not low <= value <= high:
        raise ValueError(
            f"{name}: expected a number in [{low:g}, {high:g}]{hint}, got {_show(value)}"
        )


def _show(value: Any) -> str:
    # repr refuses integers of thousands of digits
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
