"""The child process that renders a chat template, started by `model.template`.

One JSON object a line. In: first {"template", "variables", "memory_mb", "seconds"}, then
{"messages", "add_generation_prompt", "tools"}. Out: {"ready": true} or {"error": why}, then
{"text"} or {"error"} a request.

The parent kills a slow child. After the parent's death the child reads the end of its input, or an
alarm ends it. It imports nothing of lowroll, to start in a tenth of a second. A test compares the
environment with transformers'.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_TEXT = 16 << 20  # characters of a conversation


class Generation(Extension):
    """The `{% generation %}` tag, which marks an assistant's text and has no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("inside"), [], [], body).set_lineno(line)

    def inside(self, caller: Any) -> Any:
        return caller()


class Dict:
    """`dict` without a class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class SafeNamespace(Namespace):
    """`namespace` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            SafeNamespace.check(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        SafeNamespace.check(name)
        super().__setitem__(name, value)

    @staticmethod
    def check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(
                f"a namespace cannot hold {name!r}: the name begins with an underscore"
            )


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> ImmutableSandboxedEnvironment:
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    jinja.filters["tojson"] = tojson
    jinja.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": Dict(),
        "namespace": SafeNamespace,
    }
    return jinja


def protect(memory_mb: int) -> None:
    """Limit the address space, and forbid writing files."""
    for kind, limit in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard_limit = resource.getrlimit(kind)
        limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
        resource.setrlimit(kind, (limit, limit))


def error(reason: BaseException) -> dict[str, str]:
    if isinstance(reason, MemoryError):
        description = "more memory than it may use"
    else:
        description = f"{type(reason).__name__}: {reason}"
    return {"error": description[:1000]}


def main() -> None:
    """Render the conversations of requests until the input ends."""
    setup = json.loads(sys.stdin.buffer.readline())
    protect(setup["memory_mb"])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, setup["seconds"])

    def reply(message: dict[str, Any]) -> None:
        sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)

    try:
        template = environment().from_string(setup["template"])
    except (Exception, MemoryError) as reason:  # reported to the parent
        return reply(error(reason))
    reply({"ready": True})
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, setup["seconds"])
        try:
            request = json.loads(line)
            text = template.render(
                messages=request["messages"],
                tools=request["tools"],
                documents=None,
                add_generation_prompt=request["add_generation_prompt"],
                **setup["variables"],
                **request["template_kwargs"],
            )
            if len(text) > MOST_TEXT:
                raise ValueError(
                    f"{len(text):,} characters for one conversation; {MOST_TEXT:,} at most"
                )
            reply({"text": text})
        except (Exception, MemoryError) as reason:
            reply(error(reason))


if __name__ == "__main__":
    main()
