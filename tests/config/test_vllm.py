"""`rollout.engine: vllm`: what it is refused with, by name, and what it chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowroll.config import ConfigError, from_mapping, load
from lowroll.config.vllm import FROM_RUN, REFUSED, VllmConfig

DENSE = {"engine": "vllm", "weights": "dense"}
URL = "http://127.0.0.1:8000"


def problems(tree: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_mapping({"model": "m", **tree})
    return [line.removeprefix("config: ") for line in str(caught.value).splitlines()]


# (settings beside vllm, the key that is blamed)
NOT_WITH_VLLM: list[tuple[dict[str, Any], str]] = [
    ({"rollout": {"kv": {"policy": "rkv"}}}, "rollout.kv"),
    ({"rollout": {"kv": {"dtype": "fp8"}}}, "rollout.kv"),
    ({"rollout": {"large_batch_weights": "bf16"}}, "rollout.large_batch_weights"),
    ({"rollout": {"keep_dense": True}}, "rollout.keep_dense"),
    ({"rollout": {"release_cache": True}}, "rollout.release_cache"),
    ({"rollout": {"cache_tokens": 4096}}, "rollout.cache_tokens"),
    ({"rollout": {"prefill_chunk": 16}}, "rollout.prefill_chunk"),
    ({"rollout": {"stop": ["x"]}}, "rollout.stop"),
    ({"rollout": {"min_p": 0.1, "top_p": 0.9}}, "rollout.min_p"),
    ({"rollout": {"temperature": 0.001}}, "rollout.temperature"),
    ({"rollout": {"temperature": 2.5}}, "rollout.temperature"),
    ({"eval": {"temperature": 0.001}}, "eval.temperature"),
    ({"eval": {"interval": 5, "rollouts_per_example": 4}}, "eval.rollouts_per_example"),
    ({"noise": {}}, "noise"),
    ({"rollout": {"weights": "int4"}, "train": {"forward": "aligned"}}, "train.forward"),
    ({"train": {"uaq_scale": 1.5}}, "train.uaq_scale"),
    ({"guard": {"action": "fallback"}}, "guard.action"),
]


@pytest.mark.parametrize(("changes", "key"), NOT_WITH_VLLM, ids=lambda value: repr(value)[:40])
def test_what_vllm_does_not_do_is_refused_by_name(changes: dict[str, Any], key: str) -> None:
    native = from_mapping({"model": "m", **changes})
    assert native.rollout.engine == "native"
    lines = problems({**changes, "rollout": {**DENSE, **changes.get("rollout", {})}})
    assert len(lines) == 1 and lines[0].startswith(f"{key}: not with rollout.engine: vllm: ")


def test_replay_is_refused_beside_the_cache_that_it_replays() -> None:
    kv = {"policy": "rkv"}
    lines = problems({"rollout": {**DENSE, "kv": kv}, "train": {"replay_kv": True}})
    assert {line.split(":")[0] for line in lines} == {"rollout.kv", "train.replay_kv"}


def test_the_format_is_asked_for() -> None:
    """The default is of lowroll's own engine, and would be a conversion that nobody asked for."""
    (line,) = problems({"rollout": {"engine": "vllm"}})
    assert line.startswith("rollout.engine: vllm needs rollout.weights beside it")
    (line,) = problems({"rollout": {"engine": "sglang", "weights": "dense"}})
    assert line == "rollout.engine: must be one of native, vllm, got 'sglang'"


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"url": "127.0.0.1:8000"}, "rollout.vllm.url: must be an address such as"),
        ({"url": "ftp://host"}, "rollout.vllm.url: must be an address such as"),
        ({"url": "http://"}, "rollout.vllm.url: must be an address such as"),
        ({"url": "http://host:99999"}, "rollout.vllm.url: must be an address such as"),
        ({"url": "http://me:secret@host"}, "rollout.vllm.url: must be an address such as"),
        ({"url": "http://host?token=x"}, "rollout.vllm.url: must be an address such as"),
        ({"url": URL, "python": "python3"}, "rollout.vllm.python: is for a server that lowroll"),
        (
            {"url": URL, "tensor_parallel_size": 2},
            "rollout.vllm.tensor_parallel_size: is for a server that lowroll starts",
        ),
        (
            {"url": URL, "serve_args": ["--swap-space", "1"]},
            "rollout.vllm.serve_args: is for a server that lowroll starts",
        ),
        (
            {"token_env": "T"},
            "rollout.vllm.token_env: is for a server at rollout.vllm.url; one that lowroll starts "
            "listens on a socket of its own",
        ),
        ({"max_lora_rank": 8}, "rollout.vllm.max_lora_rank: 8 is less than train.lora_rank, 16"),
        ({"transfer": "nccl"}, "rollout.vllm.transfer: nccl is for all weights"),
        ({"url": URL, "devices": "1"}, "rollout.vllm.devices: is for a server that lowroll"),
        ({"gpu_memory_utilization": 1.5}, "rollout.vllm.gpu_memory_utilization: must be < 1"),
        ({"max_concurrent": 8}, "rollout.vllm.max_concurrent: the key is gone, and only 256 works"),
        ({"port": 8000}, "rollout.vllm.port: unknown key; here it is rollout.vllm.url"),
        ({"tensor_paralel_size": 2}, "rollout.vllm.tensor_paralel_size: unknown key (did you mean"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_section_is_checked(section: dict[str, Any], told: str) -> None:
    (line,) = problems({"rollout": {**DENSE, "vllm": section}, "train": {"lora": True}})
    assert line.startswith(told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--trust-remote-code"], "code from a model repository is never run"),
        (["--trust_remote_code"], "code from a model repository is never run"),
        (["--trust-remote"], "code from a model repository is never run"),
        (["--kv-cache-dtype=fp8"], "rollout.kv.dtype"),
        (["--max-model-len", "99"], "follows from train.tokens_per_microbatch"),
        (["--max-num-batched-tokens", "8", "--dtype=half"], "follows from rollout.vllm.dtype"),
        (["--speculative-config.method", "ngram"], "log-probs are not known"),
        (["-tp", "2"], "write -tp in its long form"),
        (["8"], "begins with 8, no option"),
        (["--block-size", "16\n--host"], "control characters"),
        (["--block-size", ""], "must not be empty"),
        ([8], "must be text, got 8"),
        ("--block-size 8", "must be a list"),
    ],
)
def test_options_of_the_server_are_checked(words: Any, told: str) -> None:
    (line,) = problems({"rollout": {**DENSE, "vllm": {"serve_args": words}}})
    assert line.startswith("rollout.vllm.serve_args") and told in line


def test_options_of_the_server_that_work() -> None:
    words = ["--max-num-batched-tokens", "8192", "--enforce-eager", "--swap-space=-1", "-1"[1:]]
    cfg = from_mapping({"model": "m", "rollout": {**DENSE, "vllm": {"serve_args": words}}})
    assert cfg.rollout.vllm.serve_args == tuple(words)
    assert not FROM_RUN.keys() & REFUSED.keys()


@pytest.mark.parametrize(
    ("rollout", "train", "correction"),
    [
        ({}, {}, "tis"),
        ({"top_p": 0.9}, {}, "reweight"),
        ({"weights": "nvfp4"}, {}, "acr"),
        ({"weights": "nvfp4"}, {"lora": True}, "tis"),
    ],
)
def test_auto_pays_for_another_implementation(
    rollout: dict[str, Any], train: dict[str, Any], correction: str
) -> None:
    tree = {"model": "m", "rollout": {**DENSE, **rollout}, "train": train}
    cfg = from_mapping(tree)
    assert cfg.correction == correction and "come from vllm" in cfg.notes[0]
    assert not any("leave it almost nothing" in note for note in cfg.notes)
    if not {"weights"} & rollout.keys():
        notes = from_mapping({**tree, "correction": "none"}).notes
        assert any(
            note.startswith("warning: rollouts of vllm with correction none") for note in notes
        )


def test_a_section_that_nobody_reads_is_told_and_every_run_loads_again(tmp_path: Path) -> None:
    cfg = from_mapping({"model": "m", "rollout": {"vllm": {"tensor_parallel_size": 2}}})
    assert "rollout.vllm: no effect, rollout.engine is native" in cfg.notes
    vllm = {"url": URL, "token_env": "TOKEN", "folder": "weights"}
    cfg = from_mapping({"model": "m", "rollout": {**DENSE, "vllm": vllm}})
    assert cfg.rollout.vllm == VllmConfig(**vllm)
    (tmp_path / "run.yaml").write_text(cfg.dump())
    assert load(tmp_path / "run.yaml").dump() == cfg.dump()


def test_a_relative_interpreter_is_looked_for_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    vllm = "rollout: {engine: vllm, weights: dense, vllm: {python: %s}}\n"
    for word, found in (("./python", str(tmp_path / "./python")), ("python3", "python3")):
        (tmp_path / "run.yaml").write_text("model: m\n" + vllm % word)
        assert load(tmp_path / "run.yaml").rollout.vllm.python == found
