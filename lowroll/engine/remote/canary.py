"""A check that an engine which joins a pool computes what the others do: the log-probs of a few tokens are
asked of it and of one that works, before it receives requests.

What an engine says of its weights (version, digest) is checked anyway; this finds what it does not
know: memory gone bad, a model that was read wrongly, a vLLM that kept its old weights. Both run the
same tokens alone, so that what is allowed is what other kernels or another GPU round.
"""

from __future__ import annotations

import math

from lowroll.engine.remote.http_client import HttpCall, HttpClient, ServerError
from lowroll.engine.remote.protocol import PATH, prompt_logprobs
from lowroll.engine.remote.server_base import EngineServer
from lowroll.engine.remote.verify import distance, text

BOUND = 0.1  # nats a token, root mean square
MOST_BYTES = 1 << 20


async def canary_logprobs(http: HttpClient, server: EngineServer, deadline_s: float) -> list[float]:
    """The log-probs that an engine has for the canary's tokens. ServerError."""
    dialect = server.dialect
    ids = text(dialect.vocab_size, dialect.capabilities.context_length)
    what = "its canary score"
    call = HttpCall("POST", PATH, what, dialect.scoring(ids, 0, 1.0), deadline_s, MOST_BYTES)
    rows = prompt_logprobs(await http.answer(call), ids, what)
    return [row[token][0] for row, token in zip(rows, ids[1:], strict=True)]


def compare(mine: list[float], theirs: list[float], witness: str) -> None:
    """ServerError when they are not of the same weights."""
    apart = distance(mine, theirs) if mine else 0.0
    if math.isnan(apart) or apart > BOUND:
        raise ServerError(
            f"canary: its log-probs are {apart:.3g} nats a token from those of {witness}, and "
            f"{BOUND:g} are allowed: it does not compute with the same weights"
        )
