"""A request as a body of /v1/completions, and the answer as rollouts, by token ids alone.

lowroll's own server packs the tokens and log-probs of a sample as two strings: lists of numbers
cost ten times as much.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lowroll.engine.base import PartialSample, Ranked
from lowroll.engine.remote.http_client import HttpCall, ServerError, excerpt, parse_json
from lowroll.engine.request import sampler_settings
from lowroll.types import BehaviorTag, Evictions, FinishReason, Group, Request, Rollout

PATH = "/v1/completions"
REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")
BYTES = 1 << 16  # of an answer without tokens
TOKEN_BYTES = 512  # of a token with its log-prob and text
TOP_BYTES = 128  # of one of its likeliest tokens
SCORE_BYTES = 256  # of a scored token, and of each of its likeliest
UNRANKED = 2**31
ABOVE_ZERO = 1e-4  # a log-prob may round to this
NEVER = -9999.0  # stands for minus infinity, which JSON lacks
ALL = 0.999  # mass of a whole distribution, up to rounding


def body_of(request: Request, model: str, *, seed: int, stop_ids: list[int]) -> dict[str, Any]:
    """Return the request body, with every sampler setting: a server fills missing ones from the
    model. stop_ids: the model's own included."""
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "n": request.n,
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "seed": seed,
        "stop_token_ids": stop_ids,
        "ignore_eos": True,
        "logprobs": request.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **_biases(request),
    }


def _biases(request: Request) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in request.logit_bias or ()},
    }
    return {name: value for name, value in fields.items() if value}


def tagged(behavior: BehaviorTag, request: Request, index: int) -> BehaviorTag:
    return replace(
        behavior,
        sampler=sampler_settings(request),
        seed=request.seed,
        request_id=request.id,
        sample=index,
    )


def most_bytes(request: Request) -> int:
    """Return the length of the longest answer, in which each choice repeats the prompt."""
    bytes_per_token = TOKEN_BYTES + TOP_BYTES * (request.top_logprobs + 1)
    tokens = request.n * (len(request.prompt_ids) + request.max_tokens)
    return BYTES + bytes_per_token * tokens


@dataclass
class ArrivingSample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    stated: Any = None  # the origin that lowroll's server states for the sample
    given_up: bool = False  # aborted before the answer was complete

    def read(self) -> tuple[list[int], list[float], list[list[tuple[int, float]]]]:
        """Return equally long copies, since another thread may append."""
        logprobs = list(self.logprobs)
        return self.token_ids[: len(logprobs)], logprobs, self.top_logprobs[: len(logprobs)]


# sample index, sample -> the policy that drew it, and what its cache dropped
Origin = Callable[[int, ArrivingSample], tuple[BehaviorTag, Evictions | None]]


class ResponseAssembler:
    """The choices of one request as they come, whole or in pieces. ServerError for an
    invalid one."""

    def __init__(
        self,
        request: Request,
        what: str,
        vocab_size: int,
        model: str,
        stop_ids: Collection[int] | None,
    ) -> None:
        self.request = request
        self.what = what
        self.vocab_size = vocab_size
        self.model = model
        self.stop_ids = stop_ids
        self.samples = [ArrivingSample() for _ in range(request.n)]

    def take(self, answer: Any) -> None:
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise self._invalid(f"no list of choices: {excerpt(answer)}")
        model = answer.get("model")
        if model != self.model:
            raise self._invalid(f"model {self.model} was asked for, and {excerpt(model)} answered")
        for choice in answer["choices"]:
            self._take_choice(choice)

    def on_line(self, line: bytes) -> None:
        kind, _, data = line.strip().partition(b":")
        if kind != b"data" or data.strip() == b"[DONE]":
            return
        event = parse_json(data.strip(), self.what)
        if not isinstance(event, dict):
            return
        if "error" in event:
            raise ServerError(f"{self.what}: {excerpt(event['error'])}", 500)
        if event.get("choices"):
            self.take(event)
        for origin in event.get("lowroll") or []:
            self.samples[self._index_of(origin, "the origin of a sample")].stated = origin

    def group(self, origin: Origin) -> Group:
        """Return the finished group. ServerError for a choice that has not ended properly."""
        for i, sample in enumerate(self.samples):
            self._check_end(i, sample)
        return self._group(origin)

    def aborted(self, origin: Origin) -> Group:
        """Return the group with the tokens that have come; open samples get "abort"."""
        for sample in self.samples:
            sample.finish_reason = sample.finish_reason or "abort"
            sample.given_up = True
        return self._group(origin)

    def so_far(self) -> list[PartialSample]:
        partial_samples = []
        for sample in self.samples:
            ids, logprobs, top = sample.read()
            top_logprobs = top if self.request.top_logprobs else None
            partial_samples.append(
                PartialSample(ids, logprobs, sample.finish_reason, top_logprobs, sample.stop_reason)
            )
        return partial_samples

    def _group(self, origin: Origin) -> Group:
        rollouts = []
        for i, sample in enumerate(self.samples):
            ids, logprobs, top = sample.read()
            behavior, evictions = origin(i, sample)
            rollouts.append(
                Rollout(
                    token_ids=ids,
                    logprobs=logprobs,
                    finish_reason=sample.finish_reason or "abort",
                    behavior=behavior,
                    stop_reason=sample.stop_reason,
                    evictions=evictions,
                    top_logprobs=top if self.request.top_logprobs else None,
                )
            )
        return Group(self.request, rollouts)

    def _take_choice(self, choice: Any) -> None:
        index = self._index_of(choice, "a choice of index")
        sample = self.samples[index]
        if sample.finish_reason is not None:
            raise self._invalid(f"choice {index} goes on after its end")
        ids = choice.get("prompt_token_ids")
        if ids is not None and ids != list(self.request.prompt_ids):
            raise self._invalid(
                f"choice {index} answers another prompt of {_describe_count(ids)} tokens"
            )
        self._take_tokens(index, sample, choice)
        reason = choice.get("finish_reason")
        if reason is not None and reason not in REASONS:
            raise self._invalid(f"choice {index} ended with {excerpt(reason)}")
        sample.finish_reason = reason
        stop_reason = choice.get("stop_reason")
        if stop_reason is not None and type(stop_reason) not in (int, str):
            raise self._invalid(f"choice {index}: stop_reason {excerpt(stop_reason)}")
        sample.stop_reason = stop_reason
        sample.stated = choice.get("lowroll", sample.stated)

    def _index_of(self, item: Any, label: str) -> int:
        index = item.get("index") if isinstance(item, dict) else None
        if type(index) is not int or not 0 <= index < self.request.n:
            raise self._invalid(f"{label} {excerpt(index)}; n is {self.request.n}")
        return index

    def _take_tokens(self, index: int, sample: ArrivingSample, choice: dict[str, Any]) -> None:
        logprob_fields = choice.get("logprobs")
        if not isinstance(logprob_fields, dict):
            logprob_fields = {}
        if "packed" in choice:
            ids, logprobs = self._unpacked(index, choice["packed"])
        else:
            ids = choice.get("token_ids") or []
            logprobs = logprob_fields.get("token_logprobs") or []
        self._check_tokens(index, ids, logprobs)
        if len(sample.token_ids) + len(ids) > self.request.max_tokens:
            raise self._invalid(f"choice {index}: more than max_tokens {self.request.max_tokens}")
        if self.request.top_logprobs:
            sample.top_logprobs += self._top(index, logprob_fields.get("top_logprobs"), len(ids))
        sample.token_ids += ids
        # last: another thread reads as many tokens as there are log-probs
        sample.logprobs += map(float, logprobs)

    def _check_tokens(self, index: int, ids: Any, logprobs: Any) -> None:
        if not isinstance(ids, list) or not _are_ids(ids, self.vocab_size):
            raise self._invalid(
                f"choice {index}: token ids of 0..{self.vocab_size - 1} were expected"
            )
        if not isinstance(logprobs, list) or len(logprobs) != len(ids):
            raise self._invalid(
                f"choice {index}: {len(ids)} token ids and {_describe_count(logprobs)} log-probs"
            )
        if _are_logprobs(logprobs):  # the loop finds which one is wrong
            return
        for logprob in logprobs:
            if type(logprob) not in (int, float) or not -math.inf < logprob <= ABOVE_ZERO:
                raise self._invalid(f"choice {index}: {excerpt(logprob)} is no log-prob")

    def _unpacked(self, index: int, packed: Any) -> tuple[list[int], list[float]]:
        try:
            return unpack(packed)
        except (KeyError, TypeError, ValueError):
            raise self._invalid(f"choice {index}: {excerpt(packed)} are no packed tokens") from None

    def _top(self, index: int, rows: Any, count: int) -> list[list[tuple[int, float]]]:
        """Return the (id, log-prob) pairs of the likeliest tokens at each of `count` positions,
        largest first. rows: {"token_id:5": -0.1, ...}, since two ids may have one text."""
        num_top = self.request.top_logprobs
        try:
            tops = [_drawable_pairs(entries) for entries in rows or []]
        except (AttributeError, TypeError, ValueError):
            raise self._invalid(f"choice {index}: top_logprobs are not by token id") from None
        is_complete = all(len(top) >= num_top or _has_all_mass(top) for top in tops)
        if len(tops) != count or not is_complete:
            raise self._invalid(f"choice {index}: {num_top} top_logprobs a token were asked for")
        for top in tops:
            top.sort(key=lambda pair: (-pair[1], pair[0]))
        return [top[:num_top] for top in tops]

    def _check_end(self, index: int, sample: ArrivingSample) -> None:
        count = len(sample.token_ids)
        if sample.finish_reason is None:
            raise self._invalid(f"choice {index} of {self.request.n} has not come, or not ended")
        if sample.finish_reason == "length" and count != self.request.max_tokens:
            raise self._invalid(f"choice {index} ended by its length with {count} tokens")
        if sample.finish_reason != "stop" or isinstance(sample.stop_reason, str):
            return  # only a stop by a token shows in the tokens
        ends_at_stop = count > 0
        if ends_at_stop and self.stop_ids is not None:
            ends_at_stop = sample.token_ids[-1] in self.stop_ids
        if not ends_at_stop:
            raise self._invalid(f"choice {index} stopped, and at no token that ends a response")

    def _invalid(self, what: str) -> ServerError:
        return ServerError(f"{self.what}: {what}")


class TokenScore(NamedTuple):
    logprob: float
    rank: int  # 1 for the likeliest, `UNRANKED` if not stated


def prompt_logprobs(answer: Any, ids: list[int], what: str) -> list[dict[int, TokenScore]]:
    """Parse `prompt_logprobs`: for each of ids[1:] the scores of tokens at its position by id,
    itself among them. ServerError for an invalid answer."""
    try:
        positions = answer["choices"][0]["prompt_logprobs"]
        scores_by_position = [_parse_scores(entries) for entries in positions[1:]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise ServerError(f"{what}: no prompt_logprobs: {excerpt(answer)}") from None
    if len(positions) != len(ids):
        raise ServerError(f"{what}: {len(positions)} prompt_logprobs for {len(ids)} tokens")
    for i, (scores, token) in enumerate(zip(scores_by_position, ids[1:], strict=True), 1):
        if token not in scores or not -math.inf < scores[token].logprob <= ABOVE_ZERO:
            raise ServerError(f"{what}: no log-prob of token {token} at {i}")
    return scores_by_position


def scoring_call(i: int, body: dict[str, Any], top: int, deadline_s: float) -> HttpCall:
    max_bytes = BYTES + SCORE_BYTES * (top + 1) * len(body["prompt"])
    return HttpCall("POST", PATH, f"score of sequences[{i}]", body, deadline_s, max_bytes, True)


def ranked(answer: Any, call: HttpCall, prompt_len: int, top: int) -> Ranked:
    """Parse the answer of `scoring_call`. ServerError for an invalid one."""
    import torch

    ids = call.body["prompt"]
    scores_by_position = prompt_logprobs(answer, ids, call.what)[prompt_len - 1 :]
    response = ids[prompt_len:]
    logprobs = [
        scores[token].logprob for scores, token in zip(scores_by_position, response, strict=True)
    ]
    tops = [_likeliest(scores, top) for scores in scores_by_position]
    if any(len(pairs) < top for pairs in tops):
        raise ServerError(f"{call.what}: {top} likeliest tokens a place were asked for")
    top_ids = [[token for token, _ in pairs] for pairs in tops]
    top_logprobs = [[logprob for _, logprob in pairs] for pairs in tops]
    return Ranked(
        torch.tensor(logprobs),
        torch.tensor(top_ids, dtype=torch.int64),
        torch.tensor(top_logprobs, dtype=torch.float32),
    )


def _likeliest(scores: dict[int, TokenScore], top: int) -> list[tuple[int, float]]:
    entries = [(score.rank, token, score.logprob) for token, score in scores.items()]
    by_rank = sorted(entry for entry in entries if entry[0] <= top)
    return [(token, logprob) for _, token, logprob in by_rank[:top]]


def pack(token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, str]:
    """Encode tokens and log-probs: base64 of little-endian int32 and float64."""
    count = len(token_ids)
    ids = struct.pack(f"<{count}i", *token_ids)
    values = struct.pack(f"<{count}d", *logprobs)
    return {
        "token_ids": base64.b64encode(ids).decode(),
        "logprobs": base64.b64encode(values).decode(),
    }


def unpack(packed: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Decode `pack`. KeyError, TypeError or ValueError for anything else."""
    ids = base64.b64decode(packed["token_ids"], validate=True)
    values = base64.b64decode(packed["logprobs"], validate=True)
    if len(ids) % 4 or len(values) != 2 * len(ids):
        raise ValueError(f"{len(ids)} bytes of token ids and {len(values)} of log-probs")
    count = len(ids) // 4
    return list(struct.unpack(f"<{count}i", ids)), list(struct.unpack(f"<{count}d", values))


def _are_ids(values: list[Any], vocab_size: int) -> bool:
    if not values:
        return True
    return set(map(type, values)) == {int} and 0 <= min(values) and max(values) < vocab_size


def _are_logprobs(values: list[Any]) -> bool:
    if not values:
        return True
    are_numbers = set(map(type, values)) <= {int, float}
    return are_numbers and max(values) <= ABOVE_ZERO and math.isfinite(sum(map(float, values)))


def _drawable_pairs(entries: dict[str, Any]) -> list[tuple[int, float]]:
    pairs = [(int(name.removeprefix("token_id:")), float(p)) for name, p in entries.items()]
    return [(token, logprob) for token, logprob in pairs if logprob > NEVER]


def _has_all_mass(top: list[tuple[int, float]]) -> bool:
    return sum(math.exp(min(logprob, 0.0)) for _, logprob in top) > ALL


def _parse_scores(entries: dict[str, Any]) -> dict[int, TokenScore]:
    scores = {}
    for token, entry in entries.items():
        logprob, rank = float(entry["logprob"]), entry["rank"]
        scores[int(token)] = TokenScore(logprob, UNRANKED if rank is None else int(rank))
    return scores


def _describe_count(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else "no list of"
