"""Files as no program of ours writes them: damaged ones, and model folders of somebody who means
harm."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    10**9,
    10**18,
    -(10**9),
    1e308,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x1b[31mred",
    "../../etc/passwd",
    "\ud800",
    [],
    [1],
    {},
    {"a": 1},
    ["x"] * 1000,
)
TEMPLATES = (
    "{% for a in range(10**9) %}{{ a }}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages[9] }}",
    "{% include 'x' %}",
    "{{ 'a' * 10**12 }}",
    "{% if %}",
    "{{ raise_exception('no') }}",
    "{{ messages",
    "",
)


def spoil(path: Path, others: list[Path], rng: random.Random) -> str:
    """Damage a file in one of five ways; what was done."""
    data = bytearray(path.read_bytes())
    way = rng.choice(["flip", "cut", "zeroes", "delete", "swap"])
    if way == "delete" or not data:
        path.unlink()
        return "delete"
    at = rng.randrange(len(data))
    if way == "swap":
        other = rng.choice(others)
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)
        return f"swap with {other.parent.name}/{other.name}"
    if way == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del data[at:]
    else:
        data[at:] = bytes(len(data) - at)
    path.write_bytes(data)
    return f"{way} at {at}"


def mutate(folder: Path, rng: random.Random) -> str:
    """Make a good model folder a hostile one; what was done."""
    way = rng.choice(
        [
            _config,
            _config,
            _config,
            _tokenizer,
            _template,
            _manifest,
            _header,
            _header,
            _bytes,
            _kind,
        ]
    )
    return f"{way.__name__.strip('_')}: {way(folder, rng)}"


def _config(folder: Path, rng: random.Random) -> str:
    return _edit(folder / "config.json", rng)


def _tokenizer(folder: Path, rng: random.Random) -> str:
    return _edit(rng.choice(sorted(folder.glob("tokenizer*.json"))), rng)


def _manifest(folder: Path, rng: random.Random) -> str:
    path = folder / "MANIFEST.json"
    if not path.exists():
        path.write_text(
            '{"files": {"../x": {"size": 1, "sha256": "a"}}, "meta": {}, "format": 1, "sha256": ""}'
        )
    return _edit(path, rng)


def _edit(path: Path, rng: random.Random) -> str:
    """Another value somewhere in a JSON file, or JSON that is none."""
    if rng.random() < 0.15:
        text = rng.choice(
            ["[" * 100_000, '{"a":' * 100_000, "", "null", "[]", "\x00", '{"a": 1, "a": 2}', "NaN"]
        )
        path.write_text(text)
        return f"{path.name}: {text[:20]!r}..."
    tree = json.loads(path.read_text())
    at, key = _somewhere(tree, rng)
    value = rng.choice(VALUES)
    if rng.random() < 0.15:
        del at[key]
    else:
        at[key] = value
    path.write_text(json.dumps(tree))
    return f"{path.name}: {key!r} is {str(value)[:40]!r}"


def _somewhere(tree: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container in the tree and one of its keys."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = rng.choice(keys) if keys else "new"
        inner = tree[key] if keys else None
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            return tree, key
        tree = inner


def _template(folder: Path, rng: random.Random) -> str:
    template = rng.choice(TEMPLATES)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return repr(template[:60])


def _header(folder: Path, rng: random.Random) -> str:
    """Another header of a safetensors file, of any length, over the same bytes."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = rng.choice([key for key in header if key != "__metadata__"])
    changes: tuple[tuple[str, Callable[[], object]], ...] = (
        ("shape", lambda: header[name].update(shape=[rng.choice((-1, 0, 10**12, 3)), 7])),
        ("dtype", lambda: header[name].update(dtype=rng.choice(("F64", "I32", "X", 3)))),
        (
            "offsets",
            lambda: header[name].update(
                data_offsets=[rng.choice((-8, 0, 10**15)), rng.choice((0, 10**15))]
            ),
        ),
        ("gone", lambda: header.pop(name)),
        ("type", lambda: header.update({name: 7})),
        ("name", lambda: header.update({f"\x1b[2J{name}": header.pop(name)})),
    )
    what, change = rng.choice(changes)
    change()
    text = json.dumps(header).encode()
    stated = rng.choice([len(text)] * 4 + [0, 2**63, len(text) * 2, 10**8])
    path.write_bytes(stated.to_bytes(8, "little") + text + data[8 + size :])
    return f"{name}: {what}, length {stated}"


def _bytes(folder: Path, rng: random.Random) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = rng.choice(files)
    return f"{spoil(path, files, rng)} {path.name}"


def _kind(folder: Path, rng: random.Random) -> str:
    """A folder, a FIFO, a device or a link to itself where a file should be."""
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    path.unlink()
    what = rng.choice(["folder", "fifo", "device", "loop"])
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if what == "device" else path.name)
    return f"{path.name} is a {what}"
