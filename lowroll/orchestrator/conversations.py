"""Conversations of several turns as requests to an engine.

    turn 0      the request as it is: n samples of one prompt
    turn i      for each sample a request of its own, "<id>/<sample>/<i>": the prompt, all tokens so
                far and those of the environment's new messages

A `Dialogue` returns as one group, whose rollouts hold all their turns. Earlier turns are never
re-encoded. A turn's noise depends only on the request's seed and id, the sample and the turn.

A conversation ends as "done" (the environment says so), "turns" (their limit), "length" (a turn was
cut at max_tokens), "tokens" (the sequence is full), "error" (the environment failed, which becomes
the sample's ScoreError) or "abort".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from lowroll.orchestrator.errors import InvalidRollout
from lowroll.orchestrator.interfaces import EngineClient, HasTokens, Progress, Responder, Tokenizer
from lowroll.types import (
    BehaviorTag,
    Conversation,
    Ended,
    FinishReason,
    Group,
    Message,
    PolicySpan,
    Prompt,
    Request,
    Rollout,
    ScoreError,
    Turn,
)


@dataclass(frozen=True)
class Dialogue(Request):
    """A request for n conversations. max_tokens bounds a turn, max_sequence_tokens the sequence
    with its prompt."""

    prompt: Prompt | None = None
    max_turns: int = 1
    max_sequence_tokens: int | None = None
    tools: bool = False  # the model may call tools

    @property
    def first(self) -> Request:
        values = {one.name: getattr(self, one.name) for one in fields(Request)}
        return self.sized(Request(**values))

    def sized(self, request: Request) -> Request:
        """Limit a request to the tokens left in the sequence."""
        return replace(request, max_tokens=min(self.max_tokens, self.room(len(request.prompt_ids))))

    def room(self, length: int) -> int:
        """Return the token limit of a turn after `length` tokens."""
        if self.max_sequence_tokens is None:
            return self.max_tokens
        return self.max_sequence_tokens - length

    @property
    def fits(self) -> bool:
        return self.room(len(self.prompt_ids)) >= max(1, self.min_tokens)


@dataclass
class ConversationState:
    """The state of one conversation."""

    dialogue: Dialogue
    sample: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] | None = None
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    spans: list[PolicySpan] = field(default_factory=list)
    tag: BehaviorTag | None = None
    ended: Ended | None = None
    error: ScoreError | None = None

    @property
    def length(self) -> int:
        return len(self.dialogue.prompt_ids) + len(self.token_ids)

    @property
    def said(self) -> list[Message]:
        """All messages, the prompt's included."""
        assert self.dialogue.prompt is not None
        return [*self.dialogue.prompt.messages, *self.messages]

    @property
    def named(self) -> str:
        """Environment and prompt, for error messages."""
        assert self.dialogue.prompt is not None
        return f"env {self.dialogue.prompt.env!r}, {self.dialogue.prompt.id}"

    def take(self, rollout: Rollout, message: Message) -> None:
        """Append a drawn turn, and end the conversation after the last."""
        start, request = len(self.token_ids), self.dialogue
        turn_limit = request.room(self.length)
        self.token_ids += rollout.token_ids
        self.logprobs += rollout.logprobs
        if rollout.top_logprobs is not None:
            self.tops = [*(self.tops or []), *rollout.top_logprobs]
        turn = Turn(start, len(self.token_ids), rollout.finish_reason, rollout.stop_reason)
        self.turns.append(turn)
        self.messages.append(message)
        self.tag = self.tag or rollout.behavior
        for span in rollout.behavior.policy:
            self._span(replace(span, start=start + span.start))
        if rollout.finish_reason == "abort":
            self.ended = "abort"
        elif rollout.finish_reason == "length":
            is_cut_by_sequence = turn_limit < request.max_tokens
            self.ended = "tokens" if is_cut_by_sequence else "length"
        elif len(self.turns) >= request.max_turns:
            self.ended = "turns"

    def hear(self, reply: list[Message] | None | ScoreError, tokenizer: Tokenizer) -> None:
        """Append the environment's reply, or end the conversation."""
        if isinstance(reply, ScoreError):
            self.ended, self.error = "error", reply
            return
        if reply is None:
            self.ended = "done"
            return
        request = self.dialogue
        try:
            reply_ids = tokenizer.encode_turn(reply, self.turns[-1], self.messages[-1])
        except ValueError as error:  # raised by the chat template
            self.ended, self.error = "error", ScoreError("invalid", f"{self.named}: {error}")
            return
        if request.room(self.length + len(reply_ids)) < max(1, request.min_tokens):
            self.ended = "tokens"
            return
        self.token_ids += reply_ids
        self.logprobs += [0.0] * len(reply_ids)
        if self.tops is not None:
            self.tops += [[] for _ in reply_ids]
        self.messages += reply

    @property
    def request(self) -> Request:
        """The request for the next turn."""
        dialogue = self.dialogue
        conversation_id = f"{dialogue.id}/{self.sample}"
        turn = len(self.turns)
        # turn 0 is the dialogue's own request, which all samples share
        previous_id = f"{conversation_id}/{turn - 1}" if turn > 1 else dialogue.id
        request = replace(
            dialogue.first,
            prompt_ids=[*dialogue.prompt_ids, *self.token_ids],
            n=1,
            id=f"{conversation_id}/{turn}",
            follows=previous_id,
        )
        return dialogue.sized(request)

    @property
    def rollout(self) -> Rollout:
        assert self.tag is not None and self.ended is not None
        last_turn = self.turns[-1]
        finish_reason: FinishReason = "stop"
        if self.ended in ("length", "tokens"):
            finish_reason = "length"
        elif self.ended == "abort":
            finish_reason = "abort"
        return Rollout(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=finish_reason,
            behavior=replace(self.tag, policy=tuple(self.spans)),
            stop_reason=last_turn.stop_reason,
            top_logprobs=self.tops,
            turns=tuple(self.turns),
        )

    @property
    def conversation(self) -> Conversation:
        assert self.ended is not None
        return Conversation(self.messages, self.ended, self.error)

    def _span(self, span: PolicySpan) -> None:
        if self.spans:
            last = self.spans[-1]
            if (last.version, last.digest) == (span.version, span.digest):
                return
        self.spans.append(span)


@dataclass
class _Exchange:
    """A dialogue and its conversations, which exist after the first turns.

    asked: the sample of each request in flight, by handle; None for turn 0.
    """

    dialogue: Dialogue
    talks: list[ConversationState] = field(default_factory=list)
    asked: dict[int, int | None] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return bool(self.talks) and all(talk.ended is not None for talk in self.talks)

    @property
    def group(self) -> Group:
        return Group(
            self.dialogue,
            [talk.rollout for talk in self.talks],
            [talk.conversation for talk in self.talks],
        )


@dataclass(frozen=True)
class _SoFar:
    token_ids: Sequence[int]


class Conversations:
    """An engine that also runs conversations. Not thread-safe."""

    def __init__(self, engine: EngineClient, responder: Responder, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.responder = responder
        self.tokenizer = tokenizer
        self._open: dict[int, _Exchange] = {}  # by the handle from `add`
        self._whose: dict[int, int] = {}  # engine's handle -> handle from `add`
        self._given_up: set[int] = set()  # engine's handles; their groups may still return

    def generate(self, requests: list[Request], on_progress: Progress | None = None) -> list[Group]:
        """Return all groups in order. Progress counts one turn's requests."""
        if not any(isinstance(request, Dialogue) for request in requests):
            return self.engine.generate(requests, on_progress=on_progress)
        first_requests = [
            request.first if isinstance(request, Dialogue) else request for request in requests
        ]
        first_answers = self.engine.generate(first_requests, on_progress=on_progress)
        groups = self._by_id(first_requests, first_answers)
        exchanges: dict[int, _Exchange] = {}
        for i, request in enumerate(requests):
            if isinstance(request, Dialogue):
                exchanges[i] = _Exchange(request)
                self._begin(exchanges[i], groups[i])
        open_talks = [talk for exchange in exchanges.values() for talk in exchange.talks]
        while open_talks := self._answer(open_talks):
            turn_requests = [talk.request for talk in open_talks]
            answers = self.engine.generate(turn_requests, on_progress=on_progress)
            for talk, group in zip(open_talks, self._by_id(turn_requests, answers), strict=True):
                self._take(talk, group.rollouts)
        return [exchanges[i].group if i in exchanges else group for i, group in enumerate(groups)]

    def add(self, request: Request) -> int:
        if not isinstance(request, Dialogue):
            return self._add(request)
        handle = self._add(request.first)
        self._open[handle] = _Exchange(request, asked={handle: None})
        self._whose[handle] = handle
        return handle

    def step(self) -> list[tuple[int, Group]]:
        ended: list[tuple[int, Group]] = []
        returned: dict[int, list[ConversationState]] = {}
        for handle, group in self.engine.step():
            if handle in self._given_up:
                self._given_up.discard(handle)
                continue
            owner = self._whose.pop(handle, None)
            if owner is None:
                ended.append((handle, group))
                continue
            talks = self._take_turns(self._open[owner], handle, group)
            returned.setdefault(owner, []).extend(talks)
        # one call, so that environments reply in parallel
        self._answer([talk for talks in returned.values() for talk in talks])
        for owner, talks in returned.items():
            self._ask_next_turns(owner, talks)
        finished = [owner for owner in returned if self._open[owner].has_ended]
        return ended + [(owner, self._open.pop(owner).group) for owner in finished]

    def _take_turns(
        self, exchange: _Exchange, handle: int, group: Group
    ) -> list[ConversationState]:
        sample = exchange.asked.pop(handle)
        if sample is None:
            self._begin(exchange, group)
            return exchange.talks
        talk = exchange.talks[sample]
        self._take(talk, group.rollouts)
        return [talk]

    def _ask_next_turns(self, owner: int, talks: Sequence[ConversationState]) -> None:
        for talk in talks:
            if talk.ended is None:
                handle = self._add(talk.request)
                self._open[owner].asked[handle] = talk.sample
                self._whose[handle] = owner

    def abort(self, handle: int) -> bool:
        exchange = self._open.pop(handle, None)
        if exchange is None:
            return self.engine.abort(handle)
        for engine_handle in exchange.asked:
            self._whose.pop(engine_handle, None)
            self._given_up.add(engine_handle)
            self.engine.abort(engine_handle)
        return True

    def so_far(self, handle: int) -> Sequence[HasTokens]:
        """Return the tokens drawn so far for each sample, over all turns."""
        exchange = self._open.get(handle)
        if exchange is None or not exchange.talks:
            return self.engine.so_far(handle)
        handle_by_sample = {
            sample: engine_handle for engine_handle, sample in exchange.asked.items()
        }
        talks_so_far = []
        for talk in exchange.talks:
            drawn_ids: list[int] = []
            for turn in talk.turns:
                drawn_ids += talk.token_ids[turn.start : turn.end]
            engine_handle = handle_by_sample.get(talk.sample)
            if engine_handle is not None:
                for turn_so_far in self.engine.so_far(engine_handle):
                    drawn_ids += turn_so_far.token_ids
            talks_so_far.append(_SoFar(drawn_ids))
        return talks_so_far

    def _add(self, request: Request) -> int:
        handle = self.engine.add(request)
        self._given_up.discard(handle)  # a replacement engine restarts its handles
        return handle

    def _begin(self, exchange: _Exchange, group: Group) -> None:
        exchange.talks = [
            ConversationState(exchange.dialogue, i) for i in range(len(group.rollouts))
        ]
        for talk, rollout in zip(exchange.talks, group.rollouts, strict=True):
            self._take(talk, [rollout])

    def _take(self, talk: ConversationState, rollouts: list[Rollout]) -> None:
        if len(rollouts) != 1:
            raise InvalidRollout(
                f"request {talk.request.id!r}: {len(rollouts)} rollouts, expected 1"
            )
        talk.take(rollouts[0], self.tokenizer.turn(rollouts[0].token_ids, talk.dialogue.tools))

    def _answer(self, talks: Sequence[ConversationState]) -> list[ConversationState]:
        waiting = [talk for talk in talks if talk.ended is None]
        if not waiting:
            return []
        items = [(talk.dialogue.prompt, talk.said) for talk in waiting if talk.dialogue.prompt]
        replies = self.responder.respond(items)
        for talk, reply in zip(waiting, replies, strict=True):
            talk.hear(reply, self.tokenizer)
        return [talk for talk in waiting if talk.ended is None]

    @staticmethod
    def _by_id(requests: Sequence[Request], groups: Sequence[Group]) -> list[Group]:
        group_by_id = {group.request.id: group for group in groups}
        for request in requests:
            if request.id not in group_by_id:
                raise InvalidRollout(f"request {request.id!r}: no answer")
        return [group_by_id[request.id] for request in requests]
