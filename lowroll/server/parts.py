"""How answers look: the choices of OpenAI's API and of vLLM's, whole or in parts.

A choice is written by one object from its first part to its last; one that is not streamed is
written in one part.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowroll.engine.remote.packed_tokens import pack
from lowroll.server.asks import Offer, Prompt
from lowroll.server.scoring import Scores, Top
from lowroll.server.text import Shown, Vocabulary
from lowroll.server.ticket import Delta
from lowroll.tool_calls import UNTYPED, Speech, ToolInvocation, texts, typed
from lowroll.types import Group, Rollout

Told = dict[str, list[Any]]  # log-probs as /v1/completions has them
_LEAST = -9999.0  # JSON has no infinity; vLLM's number for it


@dataclass(frozen=True)
class Names:
    """How a token is called in log-probs."""

    vocabulary: Vocabulary | None
    as_ids: bool  # "token_id:5": two tokens may look the same

    def name(self, token_id: int) -> str:
        if self.as_ids or self.vocabulary is None:
            return f"token_id:{token_id}"
        return self.vocabulary.name(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        return None if self.vocabulary is None else list(self.vocabulary.piece(token_id))


def finite(logprob: float) -> float:
    """A log-prob as JSON can hold it."""
    return max(logprob, _LEAST)


class Text:
    """The text of one choice, and where its tokens begin in it."""

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        prompt_ids: list[int],
        stop: Sequence[str],
        at: int,
        marks: bool = False,
    ) -> None:
        self.shown = Shown(vocabulary.decoder(prompt_ids, marks), stop) if vocabulary else None
        self.at = at  # characters before it

    def take(self, delta: Delta, offsets: list[int] | None) -> str:
        """What a part adds; the beginnings of its tokens are appended to `offsets`."""
        if self.shown is None:
            return ""
        ids, end = delta.token_ids, delta.finish_reason is not None
        if offsets is None:
            return self.shown.end(ids, delta.stop_reason) if end else self.shown.feed(ids)
        text = ""
        for i, token in enumerate(ids):
            offsets.append(self.at + self.shown.decoded)
            if end and i == len(ids) - 1:
                return text + self.shown.end([token], delta.stop_reason)
            text += self.shown.feed([token])
        return text + self.shown.end([], None) if end else text


class CompletionChoice:
    """One choice of /v1/completions.

    logprobs: how many of the likeliest tokens to tell; None tells no log-probs. echo: the prompt's
    text, when it is repeated, with its scores where log-probs are told. packed: nothing but ids and
    log-probs, as `engine.remote.packed_tokens` has them."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        names: Names,
        stop: Sequence[str],
        *,
        logprobs: int | None = None,
        echo: str | None = None,
        scores: Scores | None = None,
        token_ids: bool = False,
        packed: bool = False,
    ) -> None:
        self.index = index
        self.packed = packed
        self.prompt = prompt
        self.names = names
        self.logprobs = logprobs
        self.echo = echo
        self.scores = scores
        self.token_ids = token_ids
        self.text = Text(names.vocabulary, prompt.token_ids, stop, len(echo or ""))
        self.begun = False

    def part(self, delta: Delta) -> dict[str, Any]:
        """The next part as JSON."""
        if self.packed:
            return self._packed(delta)
        told = _nothing_told() if self.logprobs is not None else None
        text = ""
        if not self.begun and self.echo is not None:
            text = self.echo
            if told is not None:
                self._tell_prompt(told)
        text += self.text.take(delta, None if told is None else told["text_offset"])
        if told is not None:
            self._tell(told, delta.token_ids, delta.logprobs, delta.top_logprobs)
        choice: dict[str, Any] = {
            "index": self.index,
            "text": text,
            "logprobs": told,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.token_ids:
            choice["token_ids"] = delta.token_ids
            if not self.begun:
                choice["prompt_token_ids"] = self.prompt.token_ids
        self.begun = True
        return choice

    def _packed(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": "",
            "packed": pack(delta.token_ids, delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _tell(
        self, told: Told, ids: list[int], logprobs: list[float], tops: list[Top] | None
    ) -> None:
        name = self.names.name
        tokens = [name(token) for token in ids]
        values = [finite(logprob) for logprob in logprobs]
        told["tokens"] += tokens
        told["token_logprobs"] += values
        if not tops:
            told["top_logprobs"] += [{t: v} for t, v in zip(tokens, values, strict=True)]
            return
        for token, value, top in zip(tokens, values, tops, strict=True):
            likeliest: dict[str, float] = {}
            for other, logprob in top:
                likeliest.setdefault(name(other), finite(logprob))  # two may look the same
            likeliest.setdefault(token, value)
            told["top_logprobs"].append(likeliest)

    def _tell_prompt(self, told: Told) -> None:
        assert self.scores is not None
        ids = self.prompt.token_ids
        told["tokens"].append(self.names.name(ids[0]))
        told["token_logprobs"].append(None)
        told["top_logprobs"].append(None)
        scores = self.scores.cut(self.logprobs or 0)
        self._tell(told, ids[1:], scores.logprobs, scores.tops)
        if self.names.vocabulary is not None:
            prompt = Text(self.names.vocabulary, [], (), 0)
            prompt.take(Delta(0, ids, [], None, None, None), told["text_offset"])


def _nothing_told() -> Told:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


class ChatChoice:
    """One choice of /v1/chat/completions; logprobs as above. offer: what the model may call."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        names: Names,
        stop: Sequence[str],
        *,
        logprobs: int | None = None,
        token_ids: bool = False,
        offer: Offer | None = None,
    ) -> None:
        self.index = index
        self.names = names
        self.logprobs = logprobs
        self.token_ids = token_ids
        self.prompt = prompt
        self.offer = offer
        self.speech = Speech(offer.format) if offer is not None else None
        self.text = Text(names.vocabulary, prompt.token_ids, stop, 0, marks=offer is not None)

    def part(self, delta: Delta) -> dict[str, Any]:
        """The next part as JSON: its text as `content`, and at the end `tool_calls`, if there are
        any."""
        content, calls = self.text.take(delta, None), []
        if self.speech is not None:
            content = self.speech.feed(content)
            if delta.finish_reason is not None:
                rest, found = self.speech.end()
                content, calls = content + rest, self._told(found)
        choice: dict[str, Any] = {
            "index": self.index,
            "content": content,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if calls:
            choice["tool_calls"] = calls
            if delta.finish_reason == "stop":
                choice["finish_reason"] = "tool_calls"
        if self.logprobs is not None:
            choice["logprobs"] = {"content": contents(self.names, delta, self.logprobs)}
        if self.token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _told(self, calls: Sequence[ToolInvocation]) -> list[dict[str, Any]]:
        assert self.offer is not None
        return [
            {
                "id": call.id or self._id(number),
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call, self.offer)},
            }
            for number, call in enumerate(calls if self.offer.several else calls[:1])
        ]

    def _id(self, number: int) -> str:
        """Another one in each turn of a conversation, and the same for the same request; of nine
        characters, as some templates want it."""
        seen = repr((self.prompt.token_ids, self.index, number))
        return hashlib.sha256(seen.encode()).hexdigest()[:9]


def _arguments(call: ToolInvocation, offer: Offer) -> str:
    """As JSON; where the format writes them as text, of the types that the tool's schema says."""
    arguments = call.arguments
    if offer.format in UNTYPED:
        schemas = [t.function.parameters for t in offer.tools if t.function.name == call.name]
        arguments = typed(arguments, texts((schemas[0] if schemas else None) or {}, arguments))
    return json.dumps(arguments, ensure_ascii=False)


def contents(names: Names, delta: Delta, top: int) -> list[dict[str, Any]]:
    """Log-probs as /v1/chat/completions has them, an object a token."""
    tops = delta.top_logprobs or [[]] * len(delta.token_ids)
    return [
        _content(names, token, logprob)
        | {"top_logprobs": [_content(names, *other) for other in likeliest[:top]]}
        for token, logprob, likeliest in zip(delta.token_ids, delta.logprobs, tops, strict=True)
    ]


def _content(names: Names, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": names.name(token_id),
        "logprob": finite(logprob),
        "bytes": names.bytes(token_id),
    }


def whole(sample: int, rollout: Rollout) -> Delta:
    """A finished rollout as one part."""
    return Delta(
        sample,
        rollout.token_ids,
        rollout.logprobs,
        rollout.top_logprobs,
        rollout.finish_reason,
        rollout.stop_reason,
    )


def prompt_logprobs(
    names: Names, token_ids: list[int], scores: Scores
) -> list[dict[str, dict[str, Any]] | None]:
    """Scores as vLLM has them: by token id, None for the first token. The rank of a token that is
    not among the likeliest is not known."""
    places: list[dict[str, dict[str, Any]] | None] = [None]
    for token, logprob, top in zip(token_ids[1:], scores.logprobs, scores.tops, strict=True):
        place = {
            str(other): _ranked(names, other, value, i) for i, (other, value) in enumerate(top, 1)
        }
        place.setdefault(str(token), _ranked(names, token, logprob, None))
        places.append(place)
    return places


def _ranked(names: Names, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": names.name(token_id)}


def origin(rollout: Rollout, packed: bool = False) -> dict[str, Any]:
    """What a learner must know of a rollout beside its tokens: their log-probs as plain numbers
    (unless they are packed with the tokens), who drew it, how it ended, and what its cache
    dropped."""
    behavior, dropped = rollout.behavior, rollout.evictions
    plain = {} if packed else {"logprobs": [max(one, _LEAST) for one in rollout.logprobs]}
    return plain | {
        "behavior": vars(behavior) | {"policy": [vars(span) for span in behavior.policy]},
        "finish_reason": rollout.finish_reason,
        "stop_reason": rollout.stop_reason,
        "evictions": None
        if dropped is None
        else asdict(dropped) | {"numbers": base64.b64encode(dropped.numbers).decode()},
    }


def now() -> int:
    """Seconds since 1970, for people."""
    return time.time_ns() // 10**9


def drawn(groups: Sequence[Group]) -> int:
    """Tokens of all samples."""
    return sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)


def usage(prompts: Sequence[Prompt], completion_tokens: int) -> dict[str, int]:
    """What was read and drawn, in tokens; a prompt with several answers counts once."""
    read = sum(len(prompt.token_ids) for prompt in prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": completion_tokens,
        "total_tokens": read + completion_tokens,
    }
