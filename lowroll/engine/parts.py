"""Requests in parts that are each drawn by themselves (`rollout.parts`): what draws beside a request,
and whose pages its prompt finds, moves the last bits of its log-probs. With parts that follow from
the requests alone it is the same whatever the number of engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowroll.types import Request


def cost(request: Request) -> int:
    """Tokens that it may draw, and those of its prompt."""
    return request.n * request.max_tokens + len(request.prompt_ids)


def dealt(
    requests: Sequence[Request], count: int, wanted: Sequence[int | None] | None = None
) -> list[list[int]]:
    """Indices of the requests in each of `count` parts, of about equal cost, in their order; some
    may be empty. wanted: parts where requests would rather be: there they are, as long as their
    part has less than its share."""
    parts: list[list[int]] = [[] for _ in range(count)]
    costs = [0] * count
    fair = sum(map(cost, requests)) / count
    for i, request in enumerate(requests):
        part = None if wanted is None else wanted[i]
        if part is None or part >= count or costs[part] >= fair:
            part = costs.index(min(costs))
        parts[part].append(i)
        costs[part] += cost(request)
    return parts
