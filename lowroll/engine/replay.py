"""Replay: the tokens that a sample drew under earlier weights are drafts of what it draws now.

Noise depends on the seed, the request, the sample and the position alone, so slightly changed
weights draw the same tokens for a while. A replayed request runs its prompt again, then its draft
in pieces, as a prompt would. Behind each token the new weights draw with the noise of that
position. The draft stands up to the first token that differs, which replaces it; the rest is
dropped.

Every token that stands was thus drawn from the new weights, behind tokens that were. A piece is
computed by the products of a prompt, whose last bits are not those of a decoded token: a draw
within rounding of another token's can fall on the other side, as it can in another batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from lowroll.engine.request import noise_key
from lowroll.engine.sequence import Check, LiveGroup, Sequence

# tokens of a draft's first piece; later ones are as long as what stands, so that no more is wasted
FIRST = 256


@dataclass
class Replays:
    """The counts of drafts replayed to their end or first change."""

    samples: int = 0
    tokens: int = 0
    kept: int = 0  # of those, the ones in front of the first that differed

    def follow(self, sequence: Sequence) -> None:
        """Drop a sample's draft at its end, or where the sample has drawn another token."""
        draft, num_drawn = sequence.draft, len(sequence.token_ids)
        num_kept = min(num_drawn, len(draft))
        if num_drawn <= len(draft) and sequence.token_ids[-1] != draft[num_drawn - 1]:
            num_kept -= 1
        elif num_drawn < len(draft):
            return
        self.samples += 1
        self.tokens += len(draft)
        self.kept += num_kept
        sequence.draft = []


def begin(group: LiveGroup, drafts: Many[list[int]]) -> None:
    """Give a group its samples, each with its draft; [] is none."""
    request = group.request
    for i, draft in enumerate(drafts):
        tops = list[list[tuple[int, float]]]() if request.top_logprobs else None
        sequence = Sequence(group, i, noise_key(request, i), top_logprobs=tops, draft=draft)
        group.sequences.append(sequence)
    group.waiting.extend(group.sequences)
    group.num_open = group.num_unforked = request.n


def drawn(sequence: Sequence) -> list[int]:
    """Return a sample's tokens with what is left of its draft."""
    return sequence.token_ids + sequence.draft[len(sequence.token_ids) :]


def agreed(sequence: Sequence, token_ids: Many[int]) -> int:
    """Return how many of the tokens drawn behind a draft's are valid: those of the draft and the
    next."""
    draft_ids = sequence.draft[len(sequence.token_ids) :]
    for i, (token, draft_id) in enumerate(zip(token_ids, draft_ids, strict=False)):
        if token != draft_id:
            return i + 1
    return min(len(token_ids), len(draft_ids) + 1)


def plan_checks(
    samples: Iterable[Sequence], budget: int, chunk: int | None
) -> tuple[list[Check], int]:
    """Return the pieces of drafts that run in a step, and their tokens: at most `budget` or a
    single piece, none longer than `chunk`."""
    checks: list[Check] = []
    tokens = 0
    for sequence in samples:
        if not sequence.draft:
            continue
        max_piece = max(FIRST, len(sequence.token_ids))
        max_piece = min(max_piece, chunk or max_piece, sequence.num_left)
        ids = drawn(sequence)[len(sequence.token_ids) - 1 :][:max_piece]
        if checks and tokens + len(ids) > budget:
            break
        checks.append(Check(sequence, ids))
        tokens += len(ids)
    return checks, tokens
