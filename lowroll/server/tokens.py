"""POST /tokenize and POST /detokenize: texts and conversations as token ids, and back."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lowroll.server.answer import to_json_beside
from lowroll.server.asks import Prompt, check_model, conversation, vocabulary
from lowroll.server.body import Detokenize, Tokenize
from lowroll.server.errors import Refused
from lowroll.server.guard import read_body
from lowroll.server.serving import SERVING, Serving


async def tokenize(request: web.Request) -> web.StreamResponse:
    """The ids of a prompt, or of messages in the model's chat template."""
    serving = request.app[SERVING]
    body = await read_body(request, Tokenize)
    check_model(serving, body.model)
    ids = (await _prompt(serving, body)).token_ids
    known = vocabulary(serving, "prompt")

    def told() -> dict[str, Any]:
        return {
            "count": len(ids),
            "max_model_len": serving.capabilities.context_length,
            "tokens": ids,
            "token_strs": [known.name(one) for one in ids] if body.return_token_strs else None,
        }

    return await to_json_beside(serving, told, len(ids))


async def detokenize(request: web.Request) -> web.StreamResponse:
    """The text of ids, special tokens among them."""
    serving = request.app[SERVING]
    body = await read_body(request, Detokenize)
    check_model(serving, body.model)
    known = vocabulary(serving, "tokens")
    for i, token in enumerate(body.tokens):
        if not 0 <= token < 1 << 31:
            raise Refused(f"tokens[{i}]: expected a token id, got {token}", f"tokens[{i}]")
    text = await serving.work(known.decode, body.tokens, skip_special_tokens=False)
    return await to_json_beside(serving, lambda: {"prompt": text}, len(body.tokens))


async def _prompt(serving: Serving, body: Tokenize) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise Refused("prompt: expected prompt or messages, one of the two", "prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise Refused("add_special_tokens: the chat template has them", "add_special_tokens")
        return await conversation(
            serving,
            body.messages,
            body.add_generation_prompt,
            body.tools,
            body.chat_template_kwargs,
        )
    assert body.prompt is not None
    known = vocabulary(serving, "prompt")
    special = body.add_special_tokens is not False
    most = serving.limits.text
    if len(body.prompt) > most:
        raise Refused(
            f"prompt: {len(body.prompt):,} characters; {most:,} at most",
            "prompt",
            code="context_length_exceeded",
        )
    return Prompt(await serving.work(known.encode, body.prompt, special), body.prompt)
