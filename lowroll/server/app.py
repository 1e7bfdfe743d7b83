"""The routes of the server, and who may ask for them.

    app = make_app(serving, Tokens(), None)

Every route stands in one table with what it asks for: nothing (`open`), the token where there is
one (`token`), or always the admin's (`admin`). What is not in it is refused (`guard`).
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from lowroll.server import chat, completions, control, generate, info, models, tokens
from lowroll.server.guard import LOCAL, SILENT, Routes, Tokens, guard, mark
from lowroll.server.serving import SERVING, Serving
from lowroll.server.shelf import WeightShelf

PUBLIC: Routes = {
    ("GET", "/health"): ("open", info.health),
    ("GET", "/v1/models"): ("token", models.handle),
    ("GET", "/v1/models/{name}"): ("token", models.one),
    ("GET", "/metrics"): ("token", info.metrics),
    ("GET", "/version"): ("token", info.version),
    ("POST", "/v1/completions"): ("token", completions.handle),
    ("POST", "/v1/chat/completions"): ("token", chat.handle),
    ("POST", "/inference/v1/generate"): ("token", generate.handle),
    ("POST", "/tokenize"): ("token", tokens.tokenize),
    ("POST", "/detokenize"): ("token", tokens.detokenize),
}
CONTROL: Routes = {
    ("POST", "/pause"): ("admin", control.pause),
    ("POST", "/resume"): ("admin", control.resume),
    ("GET", "/is_paused"): ("admin", control.is_paused),
    ("POST", "/abort"): ("admin", control.abort),
    ("POST", "/reset_prefix_cache"): ("admin", control.reset_prefix_cache),
}
WEIGHTS: Routes = {
    ("GET", "/weights"): ("admin", control.weights),
    ("POST", "/weights"): ("admin", control.update_weights),
}


def make_app(
    serving: Serving,
    credentials: Tokens,
    weights: WeightShelf | None = None,
    *,
    loopback: bool = True,
) -> web.Application:
    """The server's application. Control routes are there when the admin has a token, `/weights`
    when there is a shelf too.

    loopback: clients must call the server by a name of this machine. Without, there must be a
    token: ValueError.
    """
    if not loopback and not credentials.token:
        raise ValueError("token: an address that others can reach needs one")
    routes = dict(PUBLIC)
    if credentials.admin:
        routes |= CONTROL
        routes |= WEIGHTS if weights is not None else {}
    door = guard(routes, credentials, LOCAL if loopback else None)
    app = web.Application(middlewares=[door], client_max_size=serving.limits.body)
    app[SERVING], app[SILENT] = serving, {}
    if weights is not None:
        app[control.SHELF], app[control.UPDATING] = weights, asyncio.Lock()
    for (method, path), (_, handler) in routes.items():
        # a name may be a hub id, with a slash
        app.router.add_route(method, path.replace("{name}", "{name:.+}"), handler)
    app.on_response_prepare.append(mark)
    app.on_cleanup.append(_end_workers)
    return app


async def _end_workers(app: web.Application) -> None:
    app[SERVING].workers.shutdown(wait=False, cancel_futures=True)
