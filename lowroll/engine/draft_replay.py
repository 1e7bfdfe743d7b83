"""Replay (docs/algorithms.md): the tokens that a sample drew under earlier weights are drafts of
what it draws now.

A replayed request runs its prompt again, then its draft in pieces, and the new weights draw behind
each token with the same noise. The draft stands up to the first token that differs, which replaces
it. A piece is computed by the products of a prompt, whose last bits are not those of a decoded
token.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from lowroll.engine.request import noise_key
from lowroll.engine.sequence import Check, LiveGroup, Sequence

# tokens of a draft's first piece; later pieces are as long as what stands, which bounds the waste
FIRST = 256


@dataclass
class Replays:
    """The counts of drafts replayed to their end or first change."""

    samples: int = 0
    tokens: int = 0
    kept: int = 0

    def follow(self, sequence: Sequence) -> None:
        """Drop and count a draft once all of it is drawn again, or the last token differs."""
        draft = sequence.draft
        num_drawn = len(sequence.token_ids)
        is_within = num_drawn <= len(draft)
        if is_within and sequence.token_ids[-1] != draft[num_drawn - 1]:
            num_kept = num_drawn - 1
        elif num_drawn < len(draft):
            return
        else:
            num_kept = len(draft)
        self.samples += 1
        self.tokens += len(draft)
        self.kept += num_kept
        sequence.draft = []


def begin(group: LiveGroup, drafts: Many[list[int]]) -> None:
    request = group.request
    for i, draft in enumerate(drafts):
        tops = list[list[tuple[int, float]]]() if request.top_logprobs else None
        sequence = Sequence(group, i, noise_key(request, i), top_logprobs=tops, draft=draft)
        group.sequences.append(sequence)
    group.waiting.extend(group.sequences)
    group.num_open = group.num_unforked = request.n


def drawn(sequence: Sequence) -> list[int]:
    return sequence.token_ids + sequence.draft[len(sequence.token_ids) :]


def agreed(sequence: Sequence, token_ids: Many[int]) -> int:
    """Return how many newly drawn tokens are valid: those that repeat the draft, and
    the next one."""
    rest_of_draft = sequence.draft[len(sequence.token_ids) :]
    num_repeated = 0
    for token, draft_id in zip(token_ids, rest_of_draft, strict=False):
        if token != draft_id:
            break
        num_repeated += 1
    return min(len(token_ids), num_repeated + 1)


def plan_checks(
    samples: Iterable[Sequence], budget: int, chunk: int | None
) -> tuple[list[Check], int]:
    """Return the pieces of drafts that run in a step, and their tokens: at most `budget`, which the
    first piece may exceed. chunk: the longest piece; None: no limit."""
    checks: list[Check] = []
    num_tokens = 0
    for sequence in samples:
        if not sequence.draft:
            continue
        max_piece = min(max(FIRST, len(sequence.token_ids)), sequence.num_left)
        if chunk:
            max_piece = min(max_piece, chunk)
        # the first draw is behind the last drawn token
        last = len(sequence.token_ids) - 1
        ids = drawn(sequence)[last : last + max_piece]
        if checks and num_tokens + len(ids) > budget:
            break
        checks.append(Check(sequence, ids))
        num_tokens += len(ids)
    return checks, num_tokens
