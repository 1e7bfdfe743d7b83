"""The table of environments by id.

An id is one of the table, "reasoning-gym/<generator>", "verifiers/<name>", "set/<name>", or
"path/to/file.py" ("path/to/file.py:Class"), a user's own subclass of Environment. A file's code
runs here and in the scoring workers, so `make` announces it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lowroll.envs.base import Environment
from lowroll.envs.sets.table import CLASSES, PREFIX, named
from lowroll.envs.user_errors import blamed
from lowroll.types import nearest

logger = logging.getLogger(__name__)

TABLE = {
    "reverse-text": "lowroll.envs.reverse_text:ReverseText",
    "arithmetic": "lowroll.envs.arithmetic:Arithmetic",
    "chain": "lowroll.envs.chain:Chain",
    "guess": "lowroll.envs.guess:Guess",
    "records": "lowroll.envs.records:Records",
    "gsm8k": "lowroll.envs.gsm8k:GSM8K",
    "math": "lowroll.envs.math:Math",
    "code": "lowroll.envs.code:Code",
    "data": "lowroll.envs.data.environment:Data",
}
LIMITS = ("max_turns", "max_sequence_tokens")  # arguments of every environment
REASONING_GYM = "reasoning-gym/"
VERIFIERS = "verifiers/"


def ids() -> list[str]:
    """Return the ids of the built-in environments, without reasoning-gym's generators."""
    return sorted(TABLE)


def make(
    id: str, *, name: str | None = None, args: dict[str, Any] | None = None, seed: int = 0
) -> Environment:
    """Build an environment and load its data. `name` (default: the id) distinguishes uses of one
    id.

    ValueError for an unknown id or argument, a missing file, a bad row, or a missing optional
    package.
    """
    file, _ = split_file(id)
    if file is not None:
        logger.warning("environment %s runs the code of %s", name or id, file)
    env = construct(id, name=name, args=args, seed=seed)
    with blamed(f"env {env.name!r}", own_file(type(env))):
        env.size("train")  # so that a bad file is an error here
        _ = env.tools  # so that a bad tool is an error here
    return env


def construct(
    id: str, *, name: str | None = None, args: dict[str, Any] | None = None, seed: int = 0
) -> Environment:
    """Build an environment like `make`, but read data on demand, for a scoring worker."""
    name, args = name or id, dict(args or {})
    file, class_name = split_file(id)
    if file is not None:
        cls = _class_in_file(file, class_name)
    elif id.startswith(REASONING_GYM):
        cls = _import_class("lowroll.envs.reasoning_gym:ReasoningGym")
        args |= {"generator": id.removeprefix(REASONING_GYM)}
    elif id.startswith(VERIFIERS):
        cls = _import_class("lowroll.envs.verifiers:Verifiers")
        args |= {"env_id": id.removeprefix(VERIFIERS)}
    elif id.startswith(PREFIX):
        held_out = named(id.removeprefix(PREFIX))
        cls = _import_class(CLASSES[held_out.rule])
        args |= {"set": held_out.name}
    elif id in TABLE:
        cls = _import_class(TABLE[id])
    else:
        known_ids = [*ids(), f"{REASONING_GYM}<generator>", f"{VERIFIERS}<name>", f"{PREFIX}<name>"]
        raise ValueError(
            f"unknown environment {id!r}{nearest(id, known_ids, repr)}; known: {', '.join(known_ids)}, "
            f"path/to/file.py[:Class]"
        )
    limits = _take_limits(cls, args)
    _check_args(cls, id, args)
    with blamed(f"env {name!r}", own_file(cls)):
        env = cls(name=name, seed=seed, **args)
    if getattr(env, "name", None) != name:
        raise ValueError(
            f"env {name!r}: {cls.__name__}.__init__ must call super().__init__(name=name, "
            f"seed=seed)"
        )
    for key, value in limits.items():
        setattr(env, key, value)
    _check_limits(env)
    return env


def split_file(id: str) -> tuple[Path | None, str | None]:
    """Split "path/to/file.py:Class" into (absolute path, "Class"); (None, None) without a file."""
    path, colon, class_name = id.partition(".py:")
    if colon:
        return Path(path + ".py").resolve(), class_name
    return (Path(id).resolve(), None) if id.endswith(".py") else (None, None)


def own_file(cls: type[Environment]) -> str | None:
    """Return the file of a user's own environment, or None."""
    module = sys.modules.get(cls.__module__)
    return None if cls.__module__.startswith("lowroll.") else getattr(module, "__file__", None)


def _import_class(place: str) -> type[Environment]:
    module, _, class_name = place.partition(":")
    return getattr(importlib.import_module(module), class_name)


def _class_in_file(file: Path, class_name: str | None) -> type[Environment]:
    if not file.is_file():
        raise ValueError(f"environment file {file} does not exist")
    module = import_file(file)
    own_classes = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, Environment)
        and value.__module__ == module.__name__
    }
    usable_classes = {
        key: value for key, value in own_classes.items() if not inspect.isabstract(value)
    }
    if class_name is None and len(usable_classes) == 1:
        (class_name,) = usable_classes
    if class_name in usable_classes:
        return usable_classes[class_name]
    for_request = [cls for key, cls in own_classes.items() if class_name in (None, key)]
    incomplete_classes = [cls for cls in for_request if inspect.isabstract(cls)]
    if incomplete_classes:
        raise ValueError("; ".join(_describe_abstract(file, cls) for cls in incomplete_classes))
    if usable_classes and class_name is None:
        raise ValueError(
            f"{file}: several environments, {', '.join(usable_classes)}: name one, as in {file.name}:"
            f"{next(iter(usable_classes))}"
        )
    request = f"no Environment subclass {class_name!r}" if class_name else "no Environment subclass"
    raise ValueError(f"{file}: {request} (found: {', '.join(usable_classes) or 'none'})")


def _describe_abstract(file: Path, cls: type[Environment]) -> str:
    missing = sorted(cls.__abstractmethods__)
    answer_methods = [name for name in missing if name in ("gold", "perturbed")]
    hint = ""
    if answer_methods:
        hint = f"; one that knows no such answer raises NotImplementedError in {' and '.join(answer_methods)}"
    return f"{file}: class {cls.__name__} lacks {', '.join(missing)}{hint}"


def import_file(file: Path) -> ModuleType:
    """Run a user's own file; ValueError names the line that fails."""
    if (folder := str(file.parent)) not in sys.path:
        sys.path.append(folder)  # last, so that its neighbours are found and hide no modules
    key = f"lowroll_env_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(key, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # dataclasses look their module up while the file runs
    try:
        with blamed("it cannot be imported", str(file)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module


def _take_limits(cls: type[Environment], args: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    return {key: args.pop(key) for key in LIMITS if key in args and key not in parameters}


def _check_limits(env: Environment) -> None:
    for key in LIMITS:
        value = getattr(env, key)
        unbounded = value is None and key == "max_sequence_tokens"
        if not unbounded and (type(value) is not int or value < 1):
            raise ValueError(
                f"env {env.name!r}: {key}: expected a number of at least 1, got {value!r}"
            )
    if env.max_turns > 1 and type(env).respond is Environment.respond:
        raise ValueError(
            f"env {env.name!r}: max_turns is {env.max_turns}, but the environment answers nothing: "
            f"{type(env).__name__} has no respond"
        )


def _check_args(cls: type[Environment], id: str, args: dict[str, Any]) -> None:
    parameters = inspect.signature(cls).parameters
    for key in ("name", "seed"):
        if key in args:
            raise ValueError(f"env {id!r}: {key!r} stands beside args, not among them")
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for key in args:
        if key not in parameters:
            parameter_names = [p for p in parameters if p not in ("name", "seed")]
            raise ValueError(
                f"env {id!r}: unknown argument {key!r}{nearest(key, parameter_names, repr)}; known: "
                f"{', '.join(parameter_names)}"
            )
    for key, parameter in parameters.items():
        is_required = parameter.default is inspect.Parameter.empty
        if is_required and key not in args and key not in ("name", "seed"):
            raise ValueError(f"env {id!r}: argument {key!r} is missing")
