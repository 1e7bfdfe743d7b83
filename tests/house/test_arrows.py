"""The house plan against the code: which room may import which, and what stays free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "lowroll"
FILES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py"))]

# room: (rooms that it may import, packages beside the standard library)
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "types": (set(), set()),
    "machine": (set(), set()),
    "tool_calls": ({"types"}, set()),
    # config -> types: what the engine can be asked for bounds what a file may ask for; quant, kv,
    # objectives, advantages: their tables are the words that it may ask with, and need no torch
    "config": (
        {"types", "quant", "kv", "objectives", "advantages", "tool_calls"},
        {"pydantic", "pydantic_core", "yaml"},
    ),
    # quant -> kernels: a format multiplies by its kernel
    "quant": ({"kernels"}, {"torch"}),
    "checkpoint": ({"types"}, {"torch", "safetensors"}),
    # model -> checkpoint: folders of weights are published by the one atomic publisher, which knows
    # no model; msgspec reads the spec that a process of its own found
    "model": (
        {"quant", "kernels", "types", "machine", "checkpoint", "tool_calls"},
        {
            "torch",
            "safetensors",
            "transformers",
            "tokenizers",
            "huggingface_hub",
            "jinja2",
            "gguf",
            "msgspec",
        },
    ),
    "kernels": (set(), {"torch", "triton"}),
    # kv -> model: paged attention is an `attend`, and a fresh prompt attends exactly as the learner
    # does
    # kv -> types: what a policy dropped is part of a rollout
    "kv": ({"kernels", "model", "types"}, {"torch"}),
    # weights -> transport, checkpoint: a version is published as a folder, whose marker its readers
    # know without torch
    # weights -> parallel: the learner and its engines meet as ranks do
    # weights -> machine: how many may connect follows from how many files may be open; msgspec checks
    # the markers and layouts of published weights
    "weights": (
        {"model", "quant", "kernels", "transport", "checkpoint", "parallel", "machine", "types"},
        {"torch", "safetensors", "msgspec"},
    ),
    # engine -> weights: the engine takes new weights through the one corridor
    # engine -> checkpoint: weights for an engine elsewhere are laid in folders that appear whole;
    # msgspec checks what a server states
    "engine": (
        {"model", "quant", "kv", "kernels", "types", "machine", "weights", "checkpoint"},
        {"torch", "aiohttp", "llguidance", "msgspec"},
    ),
    # server -> weights, transport: new weights are read from a broadcast's folder and handed on as
    # updates
    "server": (
        {"engine", "model", "types", "weights", "transport", "checkpoint", "machine", "tool_calls"},
        {"aiohttp", "prometheus_client", "pydantic", "llguidance"},
    ),
    "objectives": (set(), {"torch"}),
    # parallel -> transport: a wait for other ranks has a deadline and names what for
    # parallel -> quant: codes are whole on every rank
    "parallel": ({"model", "transport", "quant"}, {"torch"}),
    "advantages": (set(), set()),
    # transformers makes the JSON schemas of functions, where a run begins, and reads reward models
    "envs": (
        {"types", "machine", "tool_calls"},
        {
            "transformers",
            "huggingface_hub",
            "verifiers",
            "mcp",
            "math_verify",
            "latex2sympy2_extended",
            "sympy",
            "reasoning_gym",
            "datasets",
            "pyarrow",
        },
    ),
    # transport, metrics -> checkpoint: lines with checksums and whole files, without torch
    "transport": ({"types", "checkpoint"}, {"msgspec", "zmq"}),
    "metrics": ({"checkpoint"}, {"rich", "matplotlib"}),
    # orchestrator -> checkpoint: the ledger's lines have checksums
    "orchestrator": ({"advantages", "checkpoint", "envs", "types"}, set()),
    # trainer -> advantages: with a critic, advantages are made of the learner's own values
    "trainer": (
        {
            "model",
            "kernels",
            "weights",
            "quant",
            "objectives",
            "advantages",
            "parallel",
            "transport",
            "checkpoint",
            "types",
        },
        {"torch", "bitsandbytes"},
    ),
}
# no room knows them
COMPOSITION = {"runs", "cli", "__main__"}
TORCH_FREE = (
    "engine/scheduler.py",
    "engine/sequence.py",
    "engine/request.py",
    "kv/pages.py",
    "kv/capacity.py",
    "kv/policy/dense.py",
    "kv/policy/bounded.py",
    "kv/policy/table.py",
    "quant/table.py",
    "objectives/table.py",
)
LIGHT = (
    "types",
    "checkpoint",
    "machine",
    "config",
    "advantages",
    "envs",
    "transport",
    "weights.sync.base",
    "metrics",
    "orchestrator",
    "cli.main",
    "engine.base",
    "engine.remote",
    "engine.remote.pool",
    "engine.scheduler",
    "engine.request",
    "kv.pages",
    "kv.capacity",
    "kv.policy.base",
    "kv.policy.dense",
    "kv.policy.bounded",
    "kv.policy.table",
    "quant.table",
    "server.app",
    "server.engine_thread",
    "objectives.table",
    "runs.batches",
    "runs.assembly.caches",
    "runs.assembly.environments",
    "runs.assembly.orchestrator",
    "runs.assembly.prompts",
    "runs.roles.orchestrator",
    "runs.roles.ranks",
    "runs.roles.supervisor",
)


def room_of(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(package, room) of every import, inside functions too; the room is "" outside lowroll."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides its arrow"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            yield package, rest.split(".")[0] if package == "lowroll" else ""


def forbidden_imports(file: str) -> set[str]:
    """Return the packages, of lowroll and of others, that a file imports against the plan."""
    room = room_of(file)
    found = set(imports(ast.parse((ROOT / file).read_text())))
    rooms = {there for package, there in found if package == "lowroll"} - {room}
    packages = {package for package, _ in found} - {"lowroll"} - sys.stdlib_module_names
    if room in COMPOSITION or file == "__init__.py":
        allowed = {*ROOMS, *COMPOSITION, "", "__version__"}
        if file != "__main__.py":
            allowed -= {"cli"}
        return rooms - allowed
    assert room in ROOMS, f"{room} is no package of the plan"
    torch = {"torch"} if file in TORCH_FREE else set()
    return (rooms - ROOMS[room][0]) | (packages - ROOMS[room][1]) | (packages & torch)


def test_arrows_point_down() -> None:
    found = {file: forbidden_imports(file) for file in FILES}
    assert {file: names for file, names in found.items() if names} == {}


def test_the_plan_has_no_cycle() -> None:
    left = {room: set(below) for room, (below, _) in ROOMS.items()}
    while left:
        lowest = {room for room, below in left.items() if not below & left.keys()}
        assert lowest, f"a cycle among {sorted(left)}"
        left = {room: below for room, below in left.items() if room not in lowest}


def modules_imported(file: str) -> set[str]:
    """Return the files' modules that a file imports anywhere: in functions and for types alone too."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name.removeprefix("lowroll.") for name in found if name.startswith("lowroll.")}


def cycles(below: dict[str, set[str]]) -> set[str]:
    """Return the groups of modules that reach each other, each as one line."""
    reached = {}
    for module in below:
        seen: set[str] = set()
        left = [module]
        while left:
            new = below[left.pop()] - seen
            seen |= new
            left += new
        reached[module] = seen
    groups = {
        " ".join(sorted(other for other in reached[module] if module in reached[other]))
        for module in below
    }
    return groups - {""}


def test_no_files_import_each_other_also_where_only_types_are_checked() -> None:
    modules = {f.removesuffix(".py").replace("/", "."): f for f in FILES if "__init__" not in f}
    found = cycles(
        {name: modules_imported(file) & modules.keys() for name, file in modules.items()}
    )
    assert not found


def test_a_cycle_is_seen() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b c"}


def test_the_light_rooms_leave_torch_out_of_a_fresh_interpreter() -> None:
    code = "\n".join(
        [
            "import importlib, sys",
            *(
                f"""
importlib.import_module("lowroll.{name}")
heavy = {{"torch", "transformers", "numpy"}} & sys.modules.keys()
assert not heavy, "lowroll.{name} pulls " + ", ".join(sorted(heavy))"""
                for name in LIGHT
            ),
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stderr
