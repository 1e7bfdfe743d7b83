"""What no file of the package may do: run foreign code, swallow errors, wait without end, or grow
without end.

Beside ruff's own rules (`pyproject.toml`), for what it has no rule for. An exception is listed here
with its reason, by file and function, so that a second one in the same file is seen; one that is
not needed any more is an error too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2] / "lowroll"
FILES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py"))]


@cache
def tree_of(file: str) -> ast.Module:
    """Parsed when it is asked for: each worker collects these tests, and one runs them."""
    return ast.parse((ROOT / file).read_text())


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """A million objects, which later collections of garbage would look at."""
    yield
    tree_of.cache_clear()


class Budget(NamedTuple):
    """Size is counted in thoughts: statements, and nodes of the syntax tree. Lines are the
    formatter's."""

    statements: int
    nodes: int


FUNCTION = Budget(40, 700)
KERNEL = Budget(60, 1300)  # a Triton kernel is one expression after the other
FILE_NODES = 4500

FOREIGN = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "os.system",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "numpy.load",
    "np.load",
}
SWITCHES = {
    "trust_remote_code": "False",
    "shell": "False",
    "allow_pickle": "False",
    "weights_only": "True",
}

WAITS = {
    "wait",
    "join",
    "result",
    "exception",
    "get",
    "acquire",
    "communicate",
    "poll",
}  # with a time, or for ever
ALWAYS = {"recv", "recv_bytes", "accept"}  # no time can be given: poll first
RUNS = {
    "subprocess.run",
    "subprocess.call",
    "subprocess.check_call",
    "subprocess.check_output",
    "urlopen",
}

BROAD = {  # handlers of every error that do not end in a raise
    (
        "model/folder.py",
        "ask",
    ): "every way in which there is no network, by the hub's own client",
    (
        "envs/base.py",
        "_reward_or_error",
    ): "an environment's own scorer: validate reports what it does",
    (
        "envs/answers/expressions.py",
        "_gold_tree",
    ): "the parser has no class of its own for what it cannot read; it is logged",
    ("envs/generator.py", "main"): "the other side of the pipe raises it",
    ("envs/return_values.py", "_show"): "a value's own repr",
    ("envs/tools.py", "_answer"): "a tool's own code: the model is told, and goes on",
    (
        "envs/verifiers/tasksets.py",
        "_call",
    ): "a tool's own code: the model is told, and goes on",
    ("envs/sandbox/inside.py", "be_the_program"): "a model's program: its last words, and a status",
    ("envs/sandbox/inside.py", "_end"): "what a model's program left to do at its end",
    ("envs/worker.py", "ask"): "a scorer's own code: it becomes a ScoreError",
    ("envs/worker.py", "serve"): "reported to the pool, which raises it",
    ("metrics/trackers/__init__.py", "_serve"): "a tracker's own: told once, and the run goes on",
    ("model/template_child.py", "main"): "reported to the parent, which raises it",
    ("model/tokenizer_child.py", "main"): "reported to the parent, which raises it",
    ("weights/sync/server.py", "_run"): "kept for the trainer, whose next look raises it",
    ("server/limits.py", "admit"): "the client gets a plain 500 and the log the reason",
    ("server/engine_loop.py", "perform"): "raised where the call was made",
    (
        "server/engine_loop.py",
        "_give_up",
    ): "after a failure: it is logged, and the thread goes on",
    ("server/engine_loop.py", "_iterate"): "answered to the requests in flight, and logged",
    ("runs/preflight.py", "_ask"): "an environment's own code: it becomes a line of the dry run",
}
ENDLESS = {  # waits without a time, and what looks like one
    (
        "server/engine_loop.py",
        "__aiter__",
    ): "`EngineThread` wakes it when the engine's thread hangs",
    ("server/engine_loop.py", "group"): "the same",
    ("engine/remote/router.py", "_done"): "of a task that has ended",
    ("engine/remote/http_client.py", "happens_within"): "inside of a timeout",
    ("engine/remote/replica_set.py", "report_failure"): "of a task that is done: it calls this",
    ("envs/return_values.py", "awaited"): "in a worker, which the pool ends at its deadline",
    ("envs/sandbox/jail.py", "_leave"): "the socket has a time",
    ("envs/sandbox/jail.py", "main"): "the socket has a time",
    ("kernels/launch.py", "early"): "a ContextVar's get",
    ("metrics/trackers/__init__.py", "_serve"): "a thread of its own, which `close` ends or leaves",
    ("model/recompute.py", "get"): "a tensor that is made again, not a queue",
    ("model/recompute.py", "_unpack"): "the same",
    (
        "model/shards.py",
        "finish",
    ): "a thread reads 16 MB of a file: the kernel ends that, or nothing can",
    (
        "model/shards.py",
        "stream",
    ): "the same threads: the tensors that they write to must outlive them",
    ("weights/sync/server.py", "_reply"): "for a round, which has deadlines",
    ("weights/sync/server.py", "_until"): "of the loop itself, which `close` ends",
    ("weights/sync/server.py", "_work"): "the same",
    ("weights/sync/server.py", "is_gone"): "the exception of a reader's, which is there or not",
}


def offences(tree: ast.AST) -> Iterator[str]:
    """Foreign bytes or text that would run as code, swallowed errors, clocks that jump, long
    functions."""
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [str(node.module)]
            )
            found = ", ".join({module.partition(".")[0] for module in modules} & FOREIGN)
        elif isinstance(node, ast.Call):
            found = call_offence(node)
        elif isinstance(node, ast.ExceptHandler):
            swallowed = all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
            found = "an error that is swallowed" if is_broad(node) and swallowed else ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = length_offence(node)
        if found:
            yield f"line {getattr(node, 'lineno', '?')}: {found}"


def length_offence(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return what a function has too much of, or ""."""
    allowed = KERNEL if node.decorator_list and "jit" in decorators(node) else FUNCTION
    inside = list(ast.walk(node))
    statements = sum(isinstance(part, ast.stmt) for part in inside) - 1
    if statements > allowed.statements:
        return f"{node.name} has {statements} statements"
    return f"{node.name} has {len(inside)} nodes" if len(inside) > allowed.nodes else ""


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return " ".join(ast.unparse(decorator) for decorator in node.decorator_list)


def call_offence(node: ast.Call) -> str:
    """Return what is wrong with a call, or ""."""
    called = ast.unparse(node.func)
    if called == "time.time":
        return "time.time: a deadline needs time.monotonic"
    for keyword in node.keywords:
        if keyword.arg in SWITCHES and ast.unparse(keyword.value) != SWITCHES[keyword.arg]:
            return str(keyword.arg)
        if keyword.arg == "timeout" and ast.unparse(keyword.value) == "None":
            return "timeout=None"
    return called if called in FORBIDDEN else ""


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches every error."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds
    )


def waits_without_end(node: ast.AST) -> bool:
    """Return whether a node is a call that may wait for ever."""
    if not isinstance(node, ast.Call):
        return False
    called, count = ast.unparse(node.func), len(node.args)
    timed = any(keyword.arg in ("timeout", "blocking") for keyword in node.keywords)
    if called in RUNS:
        return not timed
    if called in ("select.select", "select.poll"):  # the second only makes a poller
        return called == "select.select" and count < 4
    if not isinstance(node.func, ast.Attribute):
        return False
    name = node.func.attr
    if name == "shutdown":
        return any(
            keyword.arg == "wait" and ast.unparse(keyword.value) == "True"
            for keyword in node.keywords
        )
    if name == "select" and "objectives" not in called:
        return count == 0 and not timed
    at_once = name == "poll" and called.split(".")[-2] in (
        "process",
        "child",
    )  # subprocess's does not wait
    return name in ALWAYS or (name in WAITS and count == 0 and not timed and not at_once)


def in_functions(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(innermost function, node) of every node."""
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else name
        yield inner, node
        yield from in_functions(node, inner)


def test_no_file_runs_foreign_code_or_hides_errors() -> None:
    found = [f"{file}, {offence}" for file in FILES for offence in offences(tree_of(file))]
    assert found == []


def test_no_file_grows_without_end() -> None:
    sizes = {file: sum(1 for _ in ast.walk(tree_of(file))) for file in FILES}
    assert {file: nodes for file, nodes in sizes.items() if nodes > FILE_NODES} == {}


def test_every_broad_except_raises_or_has_its_reason() -> None:
    broad = {
        (file, function)
        for file in FILES
        for function, node in in_functions(tree_of(file))
        if isinstance(node, ast.ExceptHandler)
        and is_broad(node)
        and not isinstance(node.body[-1], ast.Raise)
    }
    assert broad == BROAD.keys()


def test_every_wait_ends_or_has_its_reason() -> None:
    endless = {
        (file, function)
        for file in FILES
        for function, node in in_functions(tree_of(file))
        if waits_without_end(node)
    }
    assert endless == ENDLESS.keys()


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from dill import loads",
        "def f():\n    import marshal",
        "eval('1')",
        "exec(text)",
        "torch.load(p)",
        "yaml.load(f, Loader=L)",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=flag)",
        "run(c, shell=True)",
        "f(weights_only=False)",
        "time.time() + 5",
        "q.get(timeout=None)",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept:\n    pass",
        "try:\n    f()\nexcept (OSError, Exception):\n    pass",
        "def f():\n" + "    x = 1\n" * 41,
    ],
)
def test_the_lint_sees(bad: str) -> None:
    assert len(list(offences(ast.parse(bad)))) == 1


@pytest.mark.parametrize(
    ("call", "ends"),
    [
        ("t.join()", False),
        ("t.join(5)", True),
        ("', '.join(words)", True),
        ("p.wait()", False),
        ("p.wait(timeout=2)", True),
        ("q.get()", False),
        ("d.get('key')", True),
        ("q.get(timeout=1)", True),
        ("f.result()", False),
        ("f.result(9)", True),
        ("poller.poll()", False),
        ("process.poll()", True),
        ("select.poll()", True),
        ("p.communicate()", False),
        ("p.communicate(timeout=1)", True),
        ("c.recv()", False),
        ("s.accept()", False),
        ("select.select(r, w, x)", False),
        ("select.select(r, w, x, 1)", True),
        ("selector.select()", False),
        ("selector.select(1)", True),
        ("subprocess.run(c)", False),
        ("subprocess.run(c, timeout=9)", True),
        ("lock.acquire()", False),
        ("lock.acquire(timeout=1)", True),
        ("pool.shutdown(wait=True)", False),
    ],
)
def test_the_lint_of_waits_sees(call: str, ends: bool) -> None:
    assert waits_without_end(ast.parse(call, mode="eval").body) is not ends
