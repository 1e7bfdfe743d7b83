"""Folders of strangers: each gives one line that names the file or the key, or works. No traceback,
hang or flood.

Every case changes one thing in a good folder and then uses it as a user would: load the model, the
tokenizer, an engine, render a conversation, generate. What comes out is a ValueError of one short
printable line, or an answer.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lowroll
from lowroll.checkpoint.atomic_folders import (
    MANIFEST,
    DamagedError,
    encode_manifest,
    publish_folder,
    read_meta,
    verify_folder,
)
from lowroll.cli.main import main
from lowroll.config import from_mapping
from lowroll.model import hf, lora, size_checks, template
from lowroll.model.spec import read_spec
from lowroll.model.tokenizer import ChatTokenizer, eos_id, load_tokenizer
from lowroll.runs.demo import build_tokenizer
from lowroll.runs.export import quantize_folder
from lowroll.types import Request, printable
from tests.fixtures.json_files import edit_json
from tests.fixtures.tiny import hf_folder

DEEP = "[" * 100_000 + "]" * 100_000
ESCAPE = "\x1b]0;owned\x07"
NAN, HUGE, LONG = float("nan"), 10**9, 10**400
Change = Callable[[Path], object]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = build_tokenizer()
    folder = hf_folder(
        tmp_path_factory.mktemp("untrusted") / "good", "qwen3", vocab_size=len(tokenizer)
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("untrusted") / "experts", "qwen3-moe")


@pytest.fixture(scope="module")
def adapter(good: Path) -> Path:
    return lora.save(lora.attach(hf.load(good), 2, 4.0), good.parent / "adapter", base=str(good))


def use(folder: Path) -> None:
    """Use a folder as a user does."""
    engine = lowroll.Engine(folder, weights="int8", device="cpu", cache_tokens=256)
    prompt = [2, 3]
    if (folder / "tokenizer.json").exists():
        chat = ChatTokenizer(load_tokenizer(folder))
        prompt = chat.encode_chat([{"role": "user", "content": "ab"}])
        chat.encode_response("ba")
        eos_id(folder)
    engine.generate([Request(prompt_ids=prompt, max_tokens=2)])


def verdict(folder: Path) -> str:
    """The line of the refusal, or "" when it works; bounded in time and memory."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        use(folder)
        line = ""
    except ValueError as error:
        line = str(error)
        assert line and line.isprintable() and len(line) < 2000, line[:3000]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 1000, f"{grown:.0f} MB more"
    assert time.monotonic() - began < 30
    return line


def edit(name: str, changes: dict[str, Any]) -> Change:
    """Put keys into a JSON file; ... removes one."""

    return lambda folder: edit_json(folder / name, **changes)


def replace(name: str, content: str | bytes | None) -> Change:
    """Another content; None: no such file."""

    def change(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def fifo(name: str) -> Change:
    return lambda folder: ((folder / name).unlink(missing_ok=True), os.mkfifo(folder / name))


def directory(name: str) -> Change:
    return lambda folder: ((folder / name).unlink(missing_ok=True), (folder / name).mkdir())


def link(name: str, target: str) -> Change:
    return lambda folder: (
        (folder / name).unlink(missing_ok=True),
        (folder / name).symlink_to(target),
    )


def header(change: Callable[[dict[str, Any]], object]) -> Change:
    """Another header over the same bytes."""

    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        content = json.loads(raw[8 : 8 + size])
        found = change(content)
        text = (found if isinstance(found, str) else json.dumps(content)).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])

    return rewrite


def tensors(change: Callable[[dict[str, Any]], object]) -> Change:
    def rewrite(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return rewrite


def index(names: dict[str, str] | str) -> Change:
    """Two shards, whose index is changed."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        weights = dict.fromkeys(load_file(folder / "part.safetensors"), "part.safetensors")
        text = names if isinstance(names, str) else json.dumps({"weight_map": {**weights, **names}})
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def config(**changes: Any) -> Change:
    return edit("config.json", changes)


def adapter_config(**changes: Any) -> Change:
    return edit("adapter_config.json", changes)


def tokenizer(**changes: Any) -> Change:
    return edit("tokenizer_config.json", changes)


def chat(text: str) -> Change:
    return replace("chat_template.jinja", text)


NORM = "model.norm.weight"
# what the line names, "" where the folder works; then the change
CASES: dict[str, tuple[str, Change]] = {
    # config.json; test_hf.py asks of every key for wrong types
    "hidden_size in words": ("hidden_size", config(hidden_size="8")),
    "hidden_size long": ("hidden_size", config(hidden_size=LONG)),
    "hidden_size missing": ("hidden_size", config(hidden_size=...)),
    "rms_norm_eps long": ("rms_norm_eps", config(rms_norm_eps=LONG)),
    **{
        f"{key} huge": (key, config(**{key: HUGE}))
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "head_dim",
        )
    },
    "kv heads huge": ("num_key_value_heads", config(num_key_value_heads=HUGE)),
    "a context of a billion": ("", config(max_position_embeddings=HUGE)),
    **{
        f"rope_theta {value!r:.9}": (
            "rope_theta",
            config(rope_parameters={"rope_type": "default", "rope_theta": value}),
        )
        for value in ("x", -1, 0, NAN, float("inf"), LONG, True)
    },
    **{
        f"rope {value!r:.12}": ("rope", config(rope_parameters=value))
        for value in ("x", [1], {"a": {"b": 1}}, 7)
    },
    "rope kind": ("rope_type", config(rope_parameters={"rope_type": [ESCAPE]})),
    "llama3 factor": ("factor", config(rope_parameters={"rope_type": "llama3", "factor": "x"})),
    "tied": ("lm_head.weight", config(tie_word_embeddings=True)),
    "bias": ("attention_bias", config(attention_bias="no")),
    "eos huge": ("", config(eos_token_id=LONG)),
    "activation": ("hidden_act", config(hidden_act=[ESCAPE])),
    "architectures": ("architectures", config(architectures=[[ESCAPE * 10_000]])),
    "architectures missing": ("architectures", config(architectures=...)),
    "layer types": ("layer_types", config(layer_types=[[ESCAPE], None])),
    "window": (
        "sliding_window",
        config(use_sliding_window=True, sliding_window="x", max_window_layers=0, layer_types=None),
    ),
    "code": ("auto_map", config(auto_map={"AutoModelForCausalLM": "evil.Evil"})),
    "quantized": ("quantization_config", config(quantization_config=ESCAPE)),
    "quantized by whom": (
        "quantization_config",
        config(quantization_config={"quant_method": [ESCAPE] * 9999}),
    ),
    "quantized with what": (
        "quantization_config",
        config(
            quantization_config={
                "quant_method": "compressed-tensors",
                "config_groups": {ESCAPE: {"weights": {"num_bits": [1]}}},
            }
        ),
    ),
    **{
        f"config {name}": ("config.json", replace("config.json", text))
        for name, text in {
            "deep": DEEP,
            "deep objects": '{"a":' * 100_000,
            "list": "[]",
            "empty": "",
            "binary": b"\xff\xfe{",
            "gone": None,
            "number": "1" * 5000,
            "large": b" " * (17 << 20),
        }.items()
    },
    "config fifo": ("config.json", fifo("config.json")),
    "config directory": ("config.json", directory("config.json")),
    "config device": ("config.json", link("config.json", "/dev/zero")),
    "config loop": ("config.json", link("config.json", "config.json")),
    "generation deep": ("generation_config.json", replace("generation_config.json", DEEP)),
    "generation wrong": (
        "generation_config.json",
        edit("generation_config.json", {"eos_token_id": "x", "temperature": -1}),
    ),
    # the tokenizer
    **{
        f"tokenizer {name}": ("tokenizer", replace("tokenizer.json", text))
        for name, text in {
            "deep": DEEP,
            "list": "[]",
            "empty": "",
            "binary": b"\xff\xfe{",
            "number": "1",
            "wrong": '{"model": 1}',
            "null": '{"model": null, "added_tokens": [{"id": -1, "content": null}]}',
        }.items()
    },
    "tokenizer fifo": ("tokenizer.json", fifo("tokenizer.json")),
    "tokenizer directory": ("tokenizer.json", directory("tokenizer.json")),
    **{
        f"tokenizer_config {name}": (
            "tokenizer_config.json",
            replace("tokenizer_config.json", text),
        )
        for name, text in {"deep": DEEP, "list": "[]", "empty": "", "binary": b"\xff\xfe{"}.items()
    },
    "tokenizer_config fifo": ("tokenizer_config.json", fifo("tokenizer_config.json")),
    **{
        f"model_max_length {value!r:.9}": ("model_max_length", tokenizer(model_max_length=value))
        for value in ("x", -1, 0, NAN, [1], {"a": 1}, True)
    },
    "model_max_length huge": ("", tokenizer(model_max_length=10**30)),
    **{
        f"eos_token {value!r:.12}": ("eos_token", tokenizer(eos_token=value))
        for value in (5, [1], {"content": 5}, {"a": 1}, True)
    },
    "no such eos": ("", tokenizer(eos_token="nobody")),
    "no eos": ("end-of-sequence", tokenizer(eos_token=...)),
    "pad_token": ("pad_token", tokenizer(pad_token=7)),
    "extra tokens": ("token", tokenizer(additional_special_tokens=[5, None])),
    "tokenizer code": ("auto_map", tokenizer(auto_map={"AutoTokenizer": ["evil.Evil", None]})),
    "tokenizer class": ("", tokenizer(tokenizer_class="Evil")),
    "special tokens deep": ("special_tokens_map.json", replace("special_tokens_map.json", DEEP)),
    "added tokens deep": ("added_tokens.json", replace("added_tokens.json", DEEP)),
    # chat templates
    "template syntax": ("chat template: TemplateSyntaxError", chat("{% if %}")),
    "template escape": ("chat template: ", chat("{{ raise_exception('" + ESCAPE + "') }}")),
    "template sandbox": (
        "chat template: SecurityError",
        chat("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    ),
    "template changes": ("chat template: SecurityError", chat("{{ messages.append(1) }}")),
    "template namespace": ("chat template: SecurityError", chat("{% set n = namespace(_a=1) %}")),
    "template undefined": ("chat template: UndefinedError", chat("{{ messages[0].a.b }}")),
    "template wrong": ("chat template: ", chat("{{ 1 / 0 }}")),
    "template include": ("chat template: ", chat("{% include '/etc/passwd' %}")),
    "template recursion": (
        "chat template: ",
        chat("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    ),
    "template text": (
        "chat template: ",
        chat("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}"),
    ),
    "template memory": ("chat template: ", chat("{{ 'a' * 10**10 }}")),
    "template constant": ("chat template: ", chat("{% set a = 10 ** (10 ** 10) %}")),
    "template loop": (
        "chat template: ",
        chat("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    ),
    "template large": ("chat template: ", chat("x" * (1 << 20) + "y")),
    # weights
    **{
        f"index {name}": ("is not a plain .safetensors file name", index({NORM: shard}))
        for name, shard in {
            "up": "../good/model.safetensors",
            "absolute": "/etc/passwd",
            "dots": "..",
            "empty": "",
            "bin": "model.bin",
            "sub": "sub/part.safetensors",
        }.items()
    },
    **{
        f"index {name}": ("is missing from the folder", index({NORM: shard}))
        for name, shard in {
            "gone": "no.safetensors",
            "escape": f"{ESCAPE}.safetensors",
        }.items()
    },
    **{
        f"index {name}": ("index.json", index(text))
        for name, text in {
            "deep": DEEP,
            "list": "[]",
            "no map": "{}",
            "map": '{"weight_map": 5}',
            "cut": "{",
        }.items()
    },
    "index tensor": ("index.json", index({ESCAPE: "part.safetensors"})),
    "weights gone": ("model.safetensors", replace("model.safetensors", None)),
    "weights empty": ("model.safetensors", replace("model.safetensors", b"")),
    "weights cut": (
        "model.safetensors",
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
    ),
    "header cut": (
        "model.safetensors",
        lambda folder: os.truncate(folder / "model.safetensors", 5),
    ),
    "weights text": ("model.safetensors", replace("model.safetensors", "hello, world")),
    "weights fifo": ("model.safetensors", fifo("model.safetensors")),
    "weights device": ("model.safetensors", link("model.safetensors", "/dev/zero")),
    "weights link": ("model.safetensors", link("model.safetensors", "/etc/passwd")),
    "weights pickled": (
        "pytorch_model.bin",
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
    ),
    "header long": (
        "model.safetensors: damaged or not a safetensors file (a header of",
        replace("model.safetensors", struct.pack("<Q", 2**63) + b"{}"),
    ),
    "header too long": (
        "model.safetensors: damaged or not a safetensors file (a header of",
        replace("model.safetensors", struct.pack("<Q", 40 << 20) + b" " * (41 << 20)),
    ),
    **{
        f"header {name}": ("model.safetensors", header(change))
        for name, change in {
            "deep": lambda _: DEEP,
            "list": lambda _: "[]",
            "nothing": lambda _: "{}",
            "overlap": lambda h: h[NORM].update(data_offsets=[0, 128]),
            "backwards": lambda h: h[NORM].update(data_offsets=[128, 0]),
            "beyond": lambda h: h[NORM].update(data_offsets=[2**62, 2**62 + 128]),
            "negative": lambda h: h[NORM].update(shape=[-32]),
            "overflow": lambda h: h[NORM].update(shape=[2**40, 2**40]),
            "dtype lie": lambda h: h[NORM].update(dtype="F64"),
            "dtype": lambda h: h[NORM].update(dtype=ESCAPE),
        }.items()
    },
    "header shape lie": (NORM, header(lambda h: h[NORM].update(shape=[4, 8]))),
    "header same size": (NORM, header(lambda h: h[NORM].update(dtype="I32"))),
    "no tensor": (NORM, tensors(lambda t: t.pop(NORM))),
    "empty tensor": (NORM, tensors(lambda t: t.update({NORM: torch.empty(0)}))),
    "integer tensor": (
        NORM,
        tensors(lambda t: t.update({NORM: torch.ones(32, dtype=torch.int64)})),
    ),
    "infinite tensor": (NORM, tensors(lambda t: t.update({NORM: torch.full((32,), torch.inf)}))),
    "strange tensor": ("unexpected", tensors(lambda t: t.update({ESCAPE: torch.ones(1)}))),
    "many tensors": (
        "unexpected",
        tensors(lambda t: t.update({f"{ESCAPE}{i}": torch.ones(1) for i in range(999)})),
    ),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_strangers_folder_gives_one_line_or_works(case: str, good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "m"))
    names, change = CASES[case]
    change(folder)
    line = verdict(folder)
    assert (names in line) if names else line == "", line


ADAPTERS: dict[str, tuple[str, Change]] = {
    **{
        f"r {value!r:.9}": ("r: ", adapter_config(r=value))
        for value in (-1, 0, "2", NAN, True, None)
    },
    "r huge": ("r = 1000000000", adapter_config(r=HUGE)),
    **{
        f"alpha {value!r:.9}": ("lora_alpha", adapter_config(lora_alpha=value))
        for value in (0, -4, NAN, float("inf"), LONG, "4", True, None)
    },
    "targets": ("target_modules", adapter_config(target_modules=[ESCAPE] * 9999)),
    "target": ("target_modules", adapter_config(target_modules={"a": 1})),
    "variant": ("use_dora", adapter_config(use_dora=True)),
    "strange key": ("not supported", edit("adapter_config.json", {ESCAPE: ESCAPE * 9999})),
    "revision": ("revision", adapter_config(revision=[ESCAPE])),
    "base type": (
        "base_model_name_or_path",
        adapter_config(base_model_name_or_path=[1]),
    ),
    "base name": (
        "opens no connection",
        adapter_config(base_model_name_or_path="evil/evil"),
    ),
    "base escape": (
        "not on this machine",
        adapter_config(base_model_name_or_path=ESCAPE),
    ),
    "base itself": (
        "adapter folder itself",
        lambda folder: adapter_config(base_model_name_or_path=str(folder))(folder),
    ),
    "config deep": ("adapter_config.json", replace("adapter_config.json", DEEP)),
    "config list": ("adapter_config.json", replace("adapter_config.json", "[]")),
    "stated deep": ("adapter_base.json", replace("adapter_base.json", DEEP)),
    "stated fifo": ("adapter_base.json", fifo("adapter_base.json")),
    **{
        f"stated scale {value!r:.9}": ("uaq_scale", edit("adapter_base.json", {"uaq_scale": value}))
        for value in (0, -1, NAN, LONG, "x")
    },
    "stated weights": ("weights", edit("adapter_base.json", {"weights": ESCAPE})),
    "tensors gone": ("adapter_model.safetensors", replace("adapter_model.safetensors", None)),
    "tensors cut": (
        "adapter_model.safetensors",
        lambda folder: os.truncate(folder / "adapter_model.safetensors", 99),
    ),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_strangers_adapter_gives_one_line(
    case: str, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was opened"))
    folder = Path(shutil.copytree(adapter, tmp_path / "a"))
    names, change = ADAPTERS[case]
    change(folder)
    assert names in verdict(folder)


def test_two_adapters_that_name_each_other(adapter: Path, tmp_path: Path) -> None:
    folders = [Path(shutil.copytree(adapter, tmp_path / name)) for name in "ab"]
    for folder, other in zip(folders, reversed(folders), strict=True):
        adapter_config(base_model_name_or_path=str(other))(folder)
    assert f"{folders[1]} is an adapter folder itself" in verdict(folders[0])


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
@pytest.mark.parametrize("value", [HUGE, -1, "6", NAN, ...])
def test_experts_that_are_not_there(key: str, value: Any, experts: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(experts, tmp_path / "m"))
    held = json.loads((folder / "config.json").read_text())
    key = key if key in held else "num_local_experts"
    config(**{key: value})(folder)
    line = verdict(folder)
    assert key.replace("local_", "") in line.replace("local_", ""), line
    assert value != HUGE or key == "num_experts_per_tok" or "1,000,000,000" in line


def test_a_model_that_is_larger_than_the_memory(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with a hole in it can be as long as it promises: then the memory decides, before
    anything is read."""
    monkeypatch.setattr(size_checks, "total_memory", lambda _: 1000)
    monkeypatch.setattr(hf, "Transformer", lambda *_: pytest.fail("a model was made"))
    with pytest.raises(
        ValueError, match=r"parameters, at least 0\.\d GB in memory, and cpu has 0.0 GB"
    ):
        hf.load(good)
    monkeypatch.undo()
    for setting, ask in (
        ("lora_rank", lambda: lora.attach(hf.load(good), HUGE, 1.0)),
        ("cache_tokens", lambda: lowroll.Engine(good, device="cpu", cache_tokens=10**12)),
    ):
        with pytest.raises(ValueError, match=rf"{setting}: .* GB, and .* GB"):
            ask()


def test_a_config_of_the_hub_alone_is_counted_too(good: Path) -> None:
    """Where a dry run has no weight files to compare with."""
    spec = replace_fields(
        read_spec(good), num_layers=HUGE, hidden_size=1, vocab_size=1, intermediate_size=1
    )
    with pytest.raises(
        ValueError, match=r"num_hidden_layers: 1,000,000,000 makes .* GB in memory, and cpu has"
    ):
        size_checks.check_memory(good / "config.json", spec, size_checks.LEAST_BITS, "cpu")


def test_a_link_is_not_copied_into_what_is_published(good: Path, tmp_path: Path) -> None:
    """A stranger's vocab.json -> ~/.ssh/id_rsa would be uploaded with the quantized model."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = Path(shutil.copytree(good, tmp_path / "m"))
    (folder / "merges.txt").symlink_to(secret)
    with pytest.raises(ValueError, match="merges.txt: a link that leads out of the folder"):
        hf.save(hf.load(folder), tmp_path / "out", tokenizer_from=folder)
    assert not (tmp_path / "out").exists()
    cache = tmp_path / "models--a--b"
    snapshot = Path(
        shutil.copytree(good, cache / "snapshots" / "0a1b")
    )  # the hub's own links are fine
    (cache / "blobs").mkdir()
    (snapshot / "tokenizer.json").rename(cache / "blobs" / "cafe")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/cafe")
    hf.save(hf.load(snapshot), tmp_path / "out", tokenizer_from=snapshot)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        good / "tokenizer.json"
    ).read_bytes()


# -- chat templates --------------------------------------------------------------------------------

TALK = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "<b>Añ 🙂</b> {{ 1 }}"},
    {"role": "assistant", "content": "ok", "name": None},
    {"role": "user", "content": " two "},
]
TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}\n{% endfor %}{{ eos_token }}",
    "{%- for m in messages %}\n  {%- if m.role == 'system' %}{% continue %}{% endif -%}\n{{ m | "
    "tojson(indent=2) }}\n"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
    "{% set n = namespace(last=0) %}{% for m in messages %}{% set n.last = loop.index0 %}{% "
    "generation %}"
    "{{ m.content }}{% endgeneration %}{% endfor %}{{ n.last }}{{ dict(a=1) | tojson }}{{ "
    "dict.fromkeys(['k'], 2) }}",
    "{{ strftime_now('%Y') }}{{ tools is none }}{{ documents is defined }}"
    "{{ messages | map(attribute='role') | join }}",
    "{% if tools %}t{% endif %}{{ messages[0].name is defined }}{{ messages[2].name is defined "
    "}}{{ '<&>' | tojson }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_a_template_makes_the_text_that_transformers_makes(source: str) -> None:
    theirs = build_tokenizer()
    theirs.chat_template = source
    for open_turn in (True, False):
        want = theirs.apply_chat_template(TALK, add_generation_prompt=open_turn, return_dict=False)
        assert ChatTokenizer(theirs).encode_chat(TALK, open_turn) == list(want)


def test_a_template_that_behaves_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loops on real data only. Its child is ended, nobody's answer is late, and the next
    conversation has a new one; a template that fills the memory ends alone; one source has one
    child."""
    sly = template.Template(
        "{% if messages|length > 1 %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}",
        {},
    )
    one = [{"role": "user", "content": "hi"}]
    assert sly.render(one) == "hi"
    first, began = sly.child, time.monotonic()
    monkeypatch.setattr(template, "SECONDS", 0.5)
    with pytest.raises(ValueError, match="chat template: no text after 0.5 s"):
        sly.render(one * 2)
    assert time.monotonic() - began < 30 and first.poll() is not None
    monkeypatch.setattr(template, "SECONDS", 10.0)
    assert sly.render(one) == "hi" and sly.child.pid != first.pid
    child = sly.child
    del sly
    assert child.poll() is not None  # nobody is left behind
    assert template.template("x", ()) is template.template("x", ())


def test_a_broken_template_says_the_same_each_time() -> None:
    broken = template.Template("{% if %}", {})
    for _ in range(2):
        with pytest.raises(ValueError, match="chat template: TemplateSyntaxError"):
            broken.render(TALK)


def test_a_looping_template_ends_without_its_parent() -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    setup = {"template": source, "variables": {}, "memory_mb": 512, "seconds": 0.5}
    asked = {"messages": TALK, "add_generation_prompt": True, "tools": None, "template_kwargs": {}}
    done = subprocess.run(
        [sys.executable, "-P", template.__file__.replace(".py", "_child.py")],
        timeout=30,
        input=f"{json.dumps(setup)}\n{json.dumps(asked)}\n",
        text=True,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGALRM and done.stdout == '{"ready": true}\n'


def test_a_template_whose_child_was_ended_has_another() -> None:
    """Somebody kills it, or the thread that started it ends, as a notebook's does; in a fork it is
    the parent's."""
    talk, plain = (
        [{"role": "user", "content": "hi"}],
        template.Template("{{ messages[0].content }}", {}),
    )
    starter = threading.Thread(target=plain.render, args=(talk,))
    starter.start()
    starter.join()
    child = plain.child
    assert plain.render(talk) == "hi" and plain.child is child
    os.kill(plain.child.pid, signal.SIGKILL)
    assert plain.render(talk) == "hi"
    forked = os.fork()
    if forked == 0:
        os._exit(0 if plain.render(talk) == "hi" else 1)
    child = plain.child
    assert os.waitpid(forked, 0)[1] == 0
    assert plain.render(talk) == "hi" and plain.child is child


# -- manifests -------------------------------------------------------------------------------------

MANIFESTS: dict[str, tuple[str, Change]] = {
    "fifo": ("not a regular file", fifo(MANIFEST)),
    "directory": ("not a regular file", directory(MANIFEST)),
    "device": ("not a regular file", link(MANIFEST, "/dev/zero")),
    "deep": ("unreadable", replace(MANIFEST, DEEP)),
    "large": ("bytes; a manifest has", replace(MANIFEST, b" " * (17 << 20))),
    "other": ("unreadable", replace(MANIFEST, "[]")),
    **{
        name: (words, replace(MANIFEST, encode_manifest(files, {})))
        for name, words, files in (  # with a right digest
            ("up", "is no file of the folder", {"../x": {"size": 0, "sha256": ""}}),
            ("absolute", "is no file of the folder", {"/etc/passwd": {"size": 0, "sha256": ""}}),
            ("nul", "is no file of the folder", {"a\0b": {"size": 0, "sha256": ""}}),
            ("empty", "is no file of the folder", {"": {"size": 0, "sha256": ""}}),
            ("entry", "expected a size and a sha256", {"config.json": 5}),
            ("size", "expected a size and a sha256", {"config.json": {"size": "9", "sha256": ""}}),
            ("digest", "expected a size and a sha256", {"config.json": {"size": 9, "sha256": [1]}}),
            ("escape", "listed in MANIFEST.json but missing", {ESCAPE: {"size": 9, "sha256": ""}}),
        )
    },
    "files": ("must be objects", replace(MANIFEST, encode_manifest([], {}))),
    "meta": ("must be objects", replace(MANIFEST, encode_manifest({}, [1]))),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_of_a_stranger(case: str, tmp_path: Path) -> None:
    words, change = MANIFESTS[case]
    folder = publish_folder(
        tmp_path / "f", lambda target: (target / "config.json").write_text("{}"), {}
    )
    change(folder)
    with pytest.raises(DamagedError, match=words) as caught:
        verify_folder(folder)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000
    assert read_meta(folder) is None or case == "escape"


# -- low-bit folders -------------------------------------------------------------------------------

STATE = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"


def state(text: bytes) -> Change:
    return tensors(lambda t: t.update({STATE: torch.tensor(list(text), dtype=torch.uint8)}))


def fill(format: str, suffix: str, value: float) -> tuple[str, str, Change]:
    def change(held: dict[str, Any]) -> None:
        name = next(name for name in held if name.endswith(f".{suffix}"))
        held[name] = torch.full(held[name].shape, value).to(held[name].dtype)

    return format, suffix, tensors(change)


LOW_BIT: dict[str, tuple[str, str, Change]] = {
    **{
        f"state {name}": ("nf4", "quant_state", state(text))
        for name, text in {
            "deep": DEEP[:9000].encode(),
            "list": b"[]",
            "empty": b"",
            "binary": b"\xff",
            "large": b" " * 99_999,
            "offset": b'{"quant_type": "nf4", "blocksize": 64, "shape": [48, 32], "nested_offset": 1'
            + b"0" * 400
            + b"}",
        }.items()
    },
    **{
        f"{format} {suffix} {value}": fill(format, suffix, value)
        for format, suffix, value in (
            ("int8", "weight_scale", NAN),
            ("int8", "weight_scale", -1.0),
            ("fp8", "weight", NAN),
            ("int4", "weight_scale", float("inf")),
            ("int4", "weight_scale", -1.0),
            ("int4", "weight_shape", -1.0),
            ("nvfp4", "weight_global_scale", 0.0),
            ("nvfp4", "weight_global_scale", -1.0),
            ("nvfp4", "weight_scale", NAN),
            ("nvfp4", "weight_scale", -1.0),
            ("mxfp4", "weight_scale", 255.0),
        )
    },
    "sizes": (
        "int4",
        "config.json",
        config(hidden_size=2**31 - 1, num_attention_heads=2**31 - 1, intermediate_size=2**31 - 1),
    ),
    "layers": ("nvfp4", "num_hidden_layers", config(num_hidden_layers=HUGE)),
}


@pytest.fixture(scope="module")
def quantized(good: Path) -> Callable[[str], Path]:
    def folder(name: str) -> Path:
        out = good.parent / name
        return out if out.exists() else quantize_folder(good, out, name).folder

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", LOW_BIT)
def test_a_strangers_low_bit_folder(
    case: str, quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    format, names, change = LOW_BIT[case]
    folder = Path(shutil.copytree(quantized(format), tmp_path / "m"))
    change(folder)
    with pytest.raises(ValueError, match=names) as caught:
        hf.load(folder)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 2000


def test_a_learning_rate_that_no_float_survives() -> None:
    for section in ("train", "critic"):
        with pytest.raises(ValueError, match=f"{section}.learning_rate: must be <= 10.0, got 1e"):
            from_mapping({"model": "m", section: {"learning_rate": 1e38}})


def test_text_for_a_terminal() -> None:
    assert printable(f"a{ESCAPE}\nb\udc80 ñ") == "a\\x1b]0;owned\\x07\\nb\\udc80 ñ"
    assert printable("a" * 600, 100) == "a" * 50 + " ... " + "a" * 50


def test_the_command_line_shows_one_line(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "m"))
    index({ESCAPE: "part.safetensors"})(folder)
    assert main(["generate", "--model", str(folder), "--prompt", "x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and err[:-1].isprintable()
