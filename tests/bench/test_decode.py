"""The decoding benchmark measures what it says: turns with fresh prompts, a peer that may fail,
honest sums."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench import (
    decode,
    harness,
    lengths,
    rivals,
    roofline,
    routing,
    startup,
    step,
    targets,
    train,
    turns,
    vllm_worker,
    work,
)
from bench.harness import Row
from bench.peer import Peer, PeerFailed
from bench.rivals import Setting
from bench.shapes import SHAPES, random_model
from bench.turns import OURS, OWN_PLAIN, Case, Found, Side, Times, measure
from bench.work import FIRST, PLAIN, SAMPLINGS, Work
from lowroll import Engine, Request
from tests.bench.workers import fake
from tests.fixtures.shapes import TINY as ONE_LAYER

TINY = {**ONE_LAYER, "num_hidden_layers": 2, "max_position_embeddings": 128}
MIXTURE = {
    **SHAPES["qwen3-30b-a3b"],
    **{
        name: TINY[name]
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "max_position_embeddings",
        )
    },
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SMALL = {"prompt_tokens": 6, "new_tokens": 5, "group": 4}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return "tiny"


# -- the peer --------------------------------------------------------------------------------------


def test_a_peer_answers_and_ends(tmp_path: Path) -> None:
    with Peer({"format": "bf16"}, fake(tmp_path), start_s=60) as peer:
        assert peer.ready["seconds"] == 2.5
        assert peer.generate([[1, 2], [3, 4]], copies=3, new_tokens=7) >= 0
    assert peer._process.returncode == 0


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies", "ended with 3, waiting for 2 responses of 5 tokens.*call 1"),
        ("hangs", "no answer within 0.5 s, waiting for 2 responses of 5 tokens"),
        ("short", "9 tokens instead of 2 x 5"),
    ],
)
def test_a_peer_that_goes_wrong_says_what_was_waited_for(
    tmp_path: Path, mode: str, said: str
) -> None:
    with Peer({"format": "bf16"}, fake(tmp_path, mode), start_s=60) as peer:
        with pytest.raises(PeerFailed, match=said):
            peer.generate([[1]], copies=2, new_tokens=5, deadline_s=0.5 if mode == "hangs" else 60)
        if mode != "short":
            with pytest.raises(PeerFailed, match="had failed before"):
                peer.generate([[1]], copies=2, new_tokens=5)


def test_a_peer_that_cannot_start_gives_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="being ready.*no kernel for nvfp4"):
        Peer({"format": "nvfp4"}, fake(tmp_path, "refuses"), start_s=60)
    with pytest.raises(PeerFailed, match="no/such/python"):
        Peer({}, ["/no/such/python"])


def test_the_worker_repeats_prompts_and_keeps_time() -> None:
    said: list[dict[str, Any]] = []
    seen: list[tuple[list[list[int]], dict[str, Any]]] = []
    lines = [
        json.dumps({"a": 1}),
        json.dumps({"prompts": [[1], [2]], "copies": 2, "new_tokens": 3, "asked": {"top_k": 4}}),
    ]
    vllm_worker.serve(
        lines,
        said.append,
        lambda settings: (
            lambda prompts, new, asked: seen.append((prompts, asked)) or len(prompts) * new,
            {"ready": settings["a"]},
        ),
    )
    assert seen == [([[1], [1], [2], [2]], {"top_k": 4})]
    assert said[0] == {"ready": 1} and said[1]["tokens"] == 12 and 0 <= said[1]["seconds"] < 1


def test_the_worker_knows_the_formats() -> None:
    assert vllm_worker.config(TINY, "bf16") == TINY and set(decode.FORMATS) <= set(
        vllm_worker.FORMATS
    )
    quantized = vllm_worker.config(TINY, "nvfp4")["quantization_config"]
    group = quantized["config_groups"]["group_0"]
    assert quantized["format"] == "nvfp4-pack-quantized" and quantized["ignore"][0] == "lm_head"
    assert group["weights"]["group_size"] == 16 and group["input_activations"] is None
    fp8 = vllm_worker.config(TINY, "fp8")["quantization_config"]["config_groups"]["group_0"]
    assert fp8["weights"]["type"] == "float" and fp8["input_activations"]["dynamic"] is True


@pytest.mark.parametrize(
    ("router", "shape"),
    [("RoutingSimulatorRouter", MIXTURE), ("FusedTopKRouter", MIXTURE), (None, TINY)],
)
def test_the_worker_has_a_mixture_routed_by_the_simulator(
    router: str | None, shape: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    class LLM:
        def __init__(self, **options: Any) -> None:
            made.append(
                options | {"strategy": os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "")}
            )

        def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
            routed = SimpleNamespace(router=type(str(router), (), {})())
            return [function(SimpleNamespace(modules=lambda: [object(), routed, routed]))]

    vllm, inputs = ModuleType("vllm"), ModuleType("vllm.inputs")
    vllm.LLM, vllm.SamplingParams, vllm.__version__, inputs.TokensPrompt = LLM, dict, "0.24.0", dict
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.inputs", inputs)
    monkeypatch.setattr(vllm_worker.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "")
    settings = {
        "name": "m",
        "shape": shape,
        "format": "fp8",
        "batches": [1, 64],
        "length": 32,
        "memory_fraction": 0.5,
        "cache_bytes": 10,
    }
    if router == "FusedTopKRouter":
        with pytest.raises(
            RuntimeError, match="routed by {'FusedTopKRouter'}, not by its simulator"
        ):
            vllm_worker.load(settings)
    else:
        assert vllm_worker.load(settings)[1]["ready"]
    assert made[0]["strategy"] == ("" if router is None else "uniform_random")
    assert made[0]["compilation_config"]["cudagraph_capture_sizes"] == [1, 8, 64]
    assert (
        json.loads((tmp_path / "bench-vllm/m-fp8/config.json").read_text())["num_hidden_layers"]
        == 2
    )


# -- turns -----------------------------------------------------------------------------------------


Calls = list[tuple[str, str, int, int, dict[str, Any]]]


def side(calls: Calls, name: str, seconds: float, family: str | None = None) -> Side:
    """Takes so long for a whole call."""

    def generate(
        prompts: list[list[int]], copies: int, new_tokens: int, asked: dict[str, Any]
    ) -> float:
        calls.append((name, str(prompts), copies * len(prompts), new_tokens, asked))
        return seconds if new_tokens == 5 else 0.4

    return Side(generate, family, plain=name == OWN_PLAIN)


def test_sides_take_turns_with_the_same_fresh_prompts() -> None:
    calls: Calls = []
    sides = {name: side(calls, name, 2.0) for name in ("ours", "other")}
    times = measure(sides, Work(8, **SMALL), 512, rounds=3, seed=1000).times
    assert [name for name, *_ in calls] == ["ours", "other"] * 8  # 2 warm-ups, 3 rounds of 2 calls
    assert all(a[1:] == b[1:] for a, b in zip(calls[::2], calls[1::2], strict=True))
    assert len({call[1] for call in calls}) == 8 and {call[2] for call in calls} == {8}
    assert [call[3] for call in calls[4::2]] == [5, 1] * 3
    assert calls[4][4] == {
        "temperature": 1.0,
        "max_tokens": 5,
        "min_tokens": 5,
        "ignore_eos": True,
    }
    assert times["other"].step_ms(5) == pytest.approx(400.0) and len(times["ours"].whole) == 3
    measure({"later": side(calls, "later", 1.0)}, Work(4, **SMALL), 512, rounds=1, seed=2000)
    assert not {c[1] for c in calls if c[0] == "later"} & {c[1] for c in calls if c[0] == "ours"}


def test_the_fastest_of_each_family_goes_on() -> None:
    calls: Calls = []
    seconds = {"a": (3.0, "fp8"), "b": (2.0, "fp8"), "c": (9.0, "int4"), OURS: (1.0, None)}
    sides = {name: side(calls, name, *how) for name, how in seconds.items()}
    found = measure(sides, Work(8, **SMALL), 512, rounds=2)
    assert set(found.times) == {"b", "c", OURS} and found.tried == {"a": 3.0}
    assert (found.rival("fp8"), found.rival("int4"), found.rival("bf16")) == ("b", "c", None)
    assert [name for name, *_ in calls].count("a") == 3  # two warm-ups and the first whole call
    assert len(found.times["b"].whole) == len(found.times[OURS].whole) == 2


def test_rivals_that_come_later_take_the_place_of_slower_ones() -> None:
    def times(**whole: float) -> dict[str, Times]:
        return {name: Times([seconds], [0.1]) for name, seconds in whole.items()}

    held: dict[str, Found] = {}
    turns.keep(held, Found(times(ours=1.0, a=3.0), {"a": "nvfp4", "z": "nvfp4"}, {"z": 8.0}))
    turns.keep(held, Found(times(ours=1.1, b=2.0), {"b": "nvfp4"}, {}))
    turns.keep(held, Found(times(ours=1.2, c=5.0), {"c": "nvfp4"}, {}))
    turns.keep(held, Found(times(ours=1.3, d=4.0), {"d": "int4"}, {}))
    assert held["nvfp4"].rival("nvfp4") == "b" and held["nvfp4"].times["ours"].whole == [1.1]
    assert held["nvfp4"].tried == {"a": 3.0, "c": 5.0, "z": 8.0}
    assert held["int4"].times["ours"].whole == [1.3]
    alone: dict[str, Found] = {}
    turns.keep(alone, Found(times(ours=1.0), {}, {}))
    turns.keep(alone, Found(times(a=3.0), {"a": "fp8"}, {}))
    assert alone["fp8"].times["ours"].whole == [1.0] and alone["fp8"].rival("fp8") == "a"


def test_a_batch_is_groups_of_equal_prompts() -> None:
    prompts = Work(64).prompts(152064, 3)
    assert len(prompts) == 8 and Work(64).copies == 8 and {len(ids) for ids in prompts} == {256}
    assert Work(1).copies == 1 and len(Work(1).prompts(152064, 3)[0]) == 256
    assert all(1520 <= token < 152064 for ids in prompts for token in ids)
    assert Work(64).cache_tokens() > 8 * 256 + 64 * 256
    apart = Work(32, 4096, 256, 1)
    assert len(apart.prompts(512, 3)) == 32 and apart.cache_tokens() > 32 * (4096 + 256)
    assert apart.title == "32 prompts of 4096, 256 new" and Work(64).title == "B=64"


def test_every_way_of_drawing_is_a_request_that_ends_at_its_length() -> None:
    for name, fields in SAMPLINGS.items():
        request = Request([1, 2], **Work(8, sampling=name).asked(5))
        assert request.ignore_eos and request.max_tokens == 5
        assert name == PLAIN or (request.top_p, request.top_k) == (0.95, 50)
        banned = name.endswith("min_tokens")
        assert (request.min_tokens == 5) == ("stop ids" not in name)
        assert bool(request.stop_ids) == (banned or name.endswith("stop ids"))
        assert all(getattr(request, key) == value for key, value in fields.items())


def test_what_is_measured_of_a_format() -> None:
    parts, batches = work.PARTS, [64, 1]
    bf16 = work.works("bf16", parts, batches)
    assert [one.title for one in bf16[:4]] == ["B=1", "B=64", "B=64, top-p + top-k"] + [
        "B=256, top-p + top-k"
    ]
    assert len(bf16) == 2 + 6 + 1 and bf16[-1] == FIRST and not work.dense_works("bf16", parts, [1])
    assert [one.batch for one in work.works("fp8", ["prompts"], batches)] == [128, 32]
    assert work.works("int8", ["prompts", "filters", "codes"], batches) == []
    assert work.dense_works("nvfp4", ["rollout"], batches) == [Work(1), Work(64)]
    assert work.works("nvfp4", ["rollout"], batches) == []
    assert work.works("nvfp4", ["codes"], batches) == [Work(1), Work(64)]


def test_the_rows_of_a_batch(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {OURS: Times([1.0, 2.0, 4.0], [0.2] * 3), "vLLM": Times([4.0, 3.0, 6.0], [0.4] * 3)}
    held = {"bf16": Found(times, {"vLLM": "bf16", "slow": "bf16"}, {"slow": 8.192})}
    whole, step, roof = turns.rows_of(Case("qwen2.5-7b", "bf16", False, Work(64), 4.27e12), held)
    assert (whole.ours, whole.peer, whole.ratio, whole.spread) == (8192.0, 4096.0, 1.5, (1.5, 4.0))
    assert (whole.must, whole.aim, whole.verdict) == (1.1, 1.3, "met")
    assert whole.against == "vLLM" and whole.note == "slow: 2,000 tokens/s at first"
    assert step.ours == pytest.approx(1.8e3 / 255) and step.ratio == pytest.approx(3.6 / 1.8)
    ideal = (14.14e9 + 64 * 384 * 57344) / 4.27e12
    assert roof.ours == pytest.approx(ideal / (1.8 / 255), rel=1e-3) and roof.verdict == "missed"
    assert roof.peer == pytest.approx(roof.ours / 2)
    alone = turns.rows_of(
        Case(tiny, "bf16", False, Work(4, **SMALL), 1e9, ["vLLM: not run (gone)"]),
        {"": Found({OURS: times[OURS]}, {}, {})},
    )
    assert [row.peer for row in alone] == [None] * 3 and {row.note for row in alone} == {
        "vLLM: not run (gone)"
    }
    assert {row.against for row in alone} == {""}


def test_the_rows_of_other_works() -> None:
    times = {
        OURS: Times([1.0], [0.5]),
        OWN_PLAIN: Times([0.9], [0.5]),
        "a": Times([2.0], [0.25]),
        "b": Times([1.5], [0.25]),
    }
    found = Found(times, {"a": "nvfp4", "b": "int4"}, {})
    drawn = Work(64, sampling=work.FILTERS)
    rows = {
        row.name: row
        for row in turns.rows_of(Case("qwen2.5-7b", "bf16", False, drawn, 1e9), {"": found})
    }
    plain = rows["qwen2.5-7b bf16 B=64, top-p + top-k: over plain sampling"]
    assert plain.ratio == pytest.approx(0.9) and (plain.must, plain.verdict) == (0.95, "missed")
    assert set(rows) - {plain.name} == {
        "qwen2.5-7b bf16 B=64, top-p + top-k: rollout",
        "qwen2.5-7b bf16 B=64, top-p + top-k: decode step",
    }
    apart = Case("qwen2.5-7b", "nvfp4", True, Work(64, 4096, 256, 1), 1e9)
    held = {"nvfp4": found, "int4": found}
    rows = {row.name: row for row in turns.rows_of(apart, held)}
    name = "qwen2.5-7b nvfp4 from codes 64 prompts of 4096, 256 new"
    assert rows[f"{name}: prefill"].ratio == 0.5 and rows[f"{name}: prefill"].against == "a"
    assert rows[f"{name}: prefill"].ours == 64 * 4096 / 0.5
    assert rows[f"{name}: decode step"].ratio == 3.5 and rows[f"{name}: decode step"].must == 1.25
    assert rows[f"{name}: rollout over int4 by Machete"].against == "b"
    alone = {"": Found({OURS: times[OURS]}, {}, {})}
    (first,) = turns.rows_of(Case("qwen2.5-7b", "bf16", False, FIRST, 1e9), alone)
    assert (first.ours, first.must, first.goal) == (1000.0, 12.0, "ours at most")


def test_the_second_family_is_vllms_fastest_format_of_four_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rivals, "version", lambda python, path: path or "0.26.0")
    fp8 = rivals.settings(rivals.families("fp8"), ["V1", "V2"], None, [])
    assert fp8 == [Setting("0.26.0", runner, "fp8") for runner in ("V1", "V2")]
    assert str(fp8[1]) == "vLLM 0.26.0, V2, fp8"
    assert [one.environment["VLLM_USE_V2_MODEL_RUNNER"] for one in fp8] == ["0", "1"]
    assert len({one.environment["VLLM_CACHE_ROOT"] for one in fp8}) == 2
    four = rivals.settings(rivals.families("nvfp4"), ["V1"], None, ["a", "b"])
    assert [(one.format, one.path) for one in four] == [
        ("nvfp4", "a"),
        ("nvfp4", "b"),
        ("int4", "a"),
        ("int4", "b"),
    ]
    assert rivals.families("int4") == ["int4"]
    assert [len(group) for group in rivals.together(four, 3)] == [3, 1]


def test_how_many_engines_fit_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 150 * 10**9))
    assert decode.fitting(30e9, 0.0, torch.device("cuda")) == (4, 5)
    assert decode.fitting(30e9, 40e9, torch.device("cuda")) == (2, 5)
    assert decode.fitting(200e9, 0.0, torch.device("cuda")) == (0, 1)
    dense, codes = decode.Variant(False, ()), decode.Variant(True, ())
    big = ("qwen2.5-32b", "nvfp4")
    assert decode.passing(*big, [codes]) == 0 < decode.passing(*big, [dense])
    both = decode.passing(*big, [dense, codes]) - decode.passing(*big, [dense])
    assert both == roofline.weight_bytes(SHAPES["qwen2.5-32b"], "bf16")
    assert decode.passing("qwen2.5-7b", "fp8", [dense]) == 0


def test_an_installation_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="no vLLM"):
        rivals.version(sys.executable, str(tmp_path))
    about = tmp_path / "vllm-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    assert rivals.version(sys.executable, str(tmp_path)) == "9.9"
    with pytest.raises(PeerFailed, match="no/such/python"):
        rivals.version("/no/such/python", None)


# -- the whole command, at tiny sizes --------------------------------------------------------------


def args_for(folder: Path, *words: str) -> list[str]:
    small = ["--models", "tiny", "--batches", "1,4", "--rounds", "1", "--device", "cpu"]
    return [*small, "--out", str(folder), *words]


def small_works(format: str, parts: list[str], batches: list[int]) -> list[Work]:
    return [
        dataclasses.replace(
            one,
            batch=min(one.batch, 4),
            prompt_tokens=min(one.prompt_tokens // 40, 48),
            new_tokens=min(one.new_tokens, 5),
            group=min(one.group, 4),
        )
        for one in work.works(format, parts, batches)
    ]


@pytest.fixture
def small(tiny: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dense = work.dense_works
    monkeypatch.setattr(decode, "works", small_works)
    monkeypatch.setattr(decode, "SCORED", Work(4, **SMALL))
    monkeypatch.setattr(
        decode,
        "dense_works",
        lambda *asked: [dataclasses.replace(one, **SMALL) for one in dense(*asked)],
    )
    monkeypatch.setattr(decode, "bandwidth", lambda device: 1e10)
    monkeypatch.setattr(rivals, "version", lambda python, path: "0.26.0")
    yield


def stored(folder: Path) -> dict[str, Row]:
    rows = [
        harness.read_row(row) for row in json.loads((folder / "decode.json").read_text())["rows"]
    ]
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


@pytest.mark.slow
def test_the_command_with_a_peer(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals, "vllm_command", lambda python: fake(tmp_path))
    words = ("--formats", "bf16", "int8", "--parts", "rollout", "agreement", "--runners", "V1")
    assert decode.main(args_for(tmp_path, *words)) == 0
    rows = stored(tmp_path)
    for format in ("bf16", "int8"):
        assert rows[f"tiny {format} B=4: rollout"].ratio > 0
        assert rows[f"tiny {format} B=4: rollout"].against == f"vLLM 0.26.0, V1, {format}"
        assert rows[f"tiny {format} B=1: decode step"].peer is not None
        assert rows[f"tiny {format}: same seed, same tokens"].met
        assert rows[f"tiny {format}: engine made, weights in memory"].peer == 2.5
        mean, tail = (
            rows[f"tiny {format}: |delta log-prob| to the learner, {n}"].ours
            for n in ("mean", "p99.9")
        )
        assert 0 < mean < tail < 0.2
    assert json.loads((tmp_path / "decode.json").read_text())["settings"]["vllm"] == "0.24.0"


@pytest.mark.slow
def test_every_part_of_four_bits(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals, "vllm_command", lambda python: fake(tmp_path))
    decode.main(args_for(tmp_path, "--formats", "nvfp4", "--parts", *work.PARTS))
    rows = stored(tmp_path)
    for name in ("tiny nvfp4 B=4", "tiny nvfp4 from codes B=4"):
        assert rows[f"{name}: rollout"].against.endswith("nvfp4")
        machete = rows[f"{name}: rollout over int4 by Machete"]
        assert machete.against.endswith("int4") and machete.ratio > 0
        assert "tokens/s at first" in machete.note  # of the other runner
    assert rows["tiny nvfp4 from codes 4 prompts of 48, 5 new: prefill"].peer > 0
    assert rows["tiny nvfp4 from codes B=1: first token of a prompt of 256"].ratio > 0


@pytest.mark.slow
def test_filters_beside_a_peer_and_beside_plain(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals, "vllm_command", lambda python: fake(tmp_path))
    parts = ("--parts", "filters", "first", "--runners", "V2")
    decode.main(args_for(tmp_path, "--formats", "bf16", *parts))
    rows = stored(tmp_path)
    for name in list(SAMPLINGS)[1:]:
        assert rows[f"tiny bf16 B=4, {name}: rollout"].peer > 0
        assert rows[f"tiny bf16 B=4, {name}: over plain sampling"].against == "ours, plain"


@pytest.mark.slow
def test_a_peer_that_dies_leaves_ours_and_the_others(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(python: str | None) -> list[str]:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return fake(folder, *(("dies", 5) if folder.name == "0" else ()))

    numbers = itertools.count()
    monkeypatch.setattr(rivals, "vllm_command", command)
    decode.main(args_for(tmp_path, "--formats", "bf16", "--parts", "rollout"))
    rows = stored(tmp_path)
    assert rows["tiny bf16 B=1: rollout"].peer is not None
    later = rows["tiny bf16 B=4: rollout"]
    assert later.ours > 0 and later.peer > 0 and "not run (it ended with 3" in later.note


@pytest.mark.slow
def test_without_a_peer_the_rows_say_so(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals, "vllm_command", lambda python: fake(tmp_path, "refuses"))
    decode.main(args_for(tmp_path, "--formats", "int8", "--parts", "rollout"))
    assert "no kernel for int8" in stored(tmp_path)["tiny int8 B=1: rollout"].note
    decode.main(args_for(tmp_path, "--formats", "bf16", "--parts", "rollout", "--peer", "none"))
    rows = stored(tmp_path)  # what the first command stored is still there
    assert {row.note for name, row in rows.items() if "B=1" in name and "bf16" in name} == {
        "vLLM: not run (not asked for)"
    }
    assert rows["tiny int8 B=1: rollout"].ours > 0


@pytest.mark.slow
def test_engines_that_do_not_fit_run_one_after_the_other(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals, "vllm_command", lambda python: fake(tmp_path))
    monkeypatch.setattr(decode, "fitting", lambda *_: (0, 1))
    decode.main(args_for(tmp_path, "--formats", "bf16", "--parts", "rollout"))
    rows = [row for name, row in stored(tmp_path).items() if "B=" in name]
    assert all("one after the other" in row.note and row.peer is not None for row in rows)
    assert len(rows) == 6


@pytest.mark.slow
def test_first_token_of_a_folder_in_a_new_process(tiny: str) -> None:
    ready, imports = startup.rows("tiny", "int8", torch.device("cpu"))
    assert (
        ready.name == targets.first_token("tiny", "int8")
        and 0 < ready.ours < 30
        and 0 < imports.ours < 60
    )


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (decode.main, ["--device", "cpu"]),
        (step.main, ["--device", "cpu"]),
        (decode.main, []),
        (step.main, []),
    ],
)
def test_a_cpu_writes_no_baselines_of_a_gpu(
    main: Callable[[list[str]], int],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(words)
    assert (
        "--out: " in (said := capsys.readouterr().err)
        and "holds the rows of a GPU and this run is on cpu" in said
    )
    with pytest.raises(SystemExit):
        main(["--device", "cuda", "--out", "/nowhere"])
    assert (
        "error: device: cuda was asked for, and torch sees no CUDA device"
        in capsys.readouterr().err
    )


# -- lengths ---------------------------------------------------------------------------------------


def test_lengths_are_forced_and_skewed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = lengths.Lengths.drawn("gsm8k-like", 1000)
    counts = sorted(n for row in drawn.tokens for n in row)
    assert len(counts) == 512 and 200 < counts[256] < 240 and 1.1 < drawn.total / 512 / 220 < 1.3
    longer = sorted(n for row in lengths.Lengths.drawn("math-like", 1000).tokens for n in row)
    assert 195 < longer[256] < 255 and longer[-1] <= 2048
    engine = Engine(random_model(TINY), "bf16", device="cpu", cache_tokens=2048, max_batch=16)
    work = lengths.Lengths([[5, 6, 7], [8, 9, 10]], [[3, 1, 9], [4, 2, 5]])
    assert lengths.run(engine, work) == lengths.run(engine, work) == 24


# -- a whole step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 4])
def test_a_step_is_split_into_its_parts(tiny: str, rank: int | None) -> None:
    case = step.Case(tiny, "int8", rank, prompts=2, samples=4, prompt_tokens=5, new_tokens=4)
    loop = step.Loop(case, torch.device("cpu"))
    before = {name: p.detach().clone() for name, p in loop.model.trainable_parameters().items()}
    run = step.Forward.run
    loop.step()
    loop.settings = dataclasses.replace(
        loop.settings, minibatches=2
    )  # now the proximal log-probs take a pass
    seconds = loop.step()
    assert step.Forward.run is run
    assert all(seconds[part] > 0 for part in ("generate", "score", "log-prob", "update", "publish"))
    assert set(seconds) == set(step.PARTS) and seconds["idle"] >= 0
    assert any(
        not torch.equal(p, before[name]) for name, p in loop.model.trainable_parameters().items()
    )
    assert loop.engine.behavior.policy[-1].version == 2


@pytest.mark.slow
def test_the_step_command(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        step.CASES,
        "tiny",
        step.Case(tiny, "fp8", prompts=2, samples=2, prompt_tokens=5, new_tokens=4),
    )
    assert (
        step.main(
            [
                "--cases",
                "tiny",
                "--steps",
                "2",
                "--publish",
                "tiny:int8",
                "--device",
                "cpu",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    rows = {row["name"]: row for row in json.loads((tmp_path / "step.json").read_text())["rows"]}
    parts = [
        rows[f"tiny all weights, fp8 rollouts: {part}"]["ours"]
        for part in (*step.PARTS, "whole step")
    ]
    assert sum(parts[:-1]) == pytest.approx(parts[-1], rel=0.5)
    assert rows["tiny publish bf16 to int8 in place"]["ours"] > 0


# -- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "format", "gigabytes"),
    [
        ("qwen2.5-1.5b", "bf16", 3.09),
        ("qwen2.5-7b", "bf16", 14.14),
        ("qwen2.5-7b", "fp8", 7.62),
        ("qwen2.5-7b", "nvfp4", 4.76),
        ("qwen2.5-32b", "int8", 32.76),
        ("qwen2.5-32b", "nvfp4", 19.11),
        ("qwen3-30b-a3b", "bf16", 60.4),
    ],
)
def test_bytes_of_a_step(model: str, format: str, gigabytes: float) -> None:
    assert roofline.weight_bytes(SHAPES[model], format) / 1e9 == pytest.approx(gigabytes, rel=3e-3)
    assert roofline.kv_bytes_per_token(SHAPES["qwen2.5-7b"]) == 57344
    more = roofline.step_bytes(SHAPES[model], format, 64, 100) - roofline.weight_bytes(
        SHAPES[model], format
    )
    if "a3b" not in model:
        assert more == 6400 * roofline.kv_bytes_per_token(SHAPES[model])


def test_a_step_reads_the_experts_that_its_rows_touch() -> None:
    config = SHAPES["qwen3-30b-a3b"]
    every, all_128, eight = (
        roofline.linear_weights(config, touched) for touched in (None, 128, 8.0)
    )
    experts = 48 * 3 * 2048 * 768  # weights of one expert in every layer
    assert every == all_128 == pytest.approx(eight + 120 * experts)
    assert roofline.step_bytes(config, "fp8", 1, 0, 8.0) == pytest.approx(eight + 2 * 151936 * 2048)
    assert routing.uniform(config, 1) == 8 and routing.uniform(config, 8) == pytest.approx(
        51.6, abs=0.1
    )
    assert routing.simulated(config, 1) == pytest.approx(
        7.78, abs=0.01
    )  # 8 draws, some of them the same
    assert decode.dense_bytes("qwen3-30b-a3b", "nvfp4") == 2 * 48 * (
        2048 * (4096 + 2 * 512) + 4096 * 2048
    )


def test_experts_are_counted_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that reads the token's parity sends it to one pair of experts or the other."""
    model = random_model(MIXTURE, dtype=torch.float32)
    with torch.no_grad():
        model.embedding.zero_()
        model.embedding[0::2, 0], model.embedding[1::2, 0] = 1.0, -1.0
        for block in model.blocks:
            block.experts.router.weight.zero_()
            block.experts.router.weight[:, 0] = torch.tensor([2.0, 1.0, -1.0, -2.0])
    prompt = [9, 9, 8]
    counts = routing.touched(
        model, [prompt + response for response in ([2, 4, 7], [4, 3, 6], [6, 2, 3])], 3, (1, 2, 3)
    )
    assert counts == {1: 2.0, 2: pytest.approx((2 + 4 + 4) / 3), 3: pytest.approx((2 + 4 + 4) / 3)}


@pytest.mark.slow
def test_a_random_mixture_routes_evenly() -> None:
    """Rows that share prompts touch as many experts as even draws would; plainly random routers
    send them together."""
    config = {
        **MIXTURE,
        "hidden_size": 256,
        "head_dim": 32,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 6,
        "vocab_size": 4096,
    }
    model, dice = random_model(config, dtype=torch.float32), random.Random(0)
    prompts = Work(64, prompt_tokens=48).prompts(4096, 1)
    rows = [ids + [dice.randrange(4096) for _ in range(8)] for ids in prompts for _ in range(8)]
    counts = routing.touched(model, rows, 48, (1, 8, 64))
    assert counts == {
        batch: pytest.approx(routing.uniform(config, batch), rel=0.03) for batch in (1, 8, 64)
    }
    with torch.no_grad():
        for block in model.blocks:
            block.experts.router.weight.normal_(generator=torch.Generator().manual_seed(0))
    assert routing.touched(model, rows, 48, (8,))[8] < 0.75 * routing.uniform(config, 8)


def test_bandwidth_of_this_machine() -> None:
    assert 1e8 < roofline.bandwidth(torch.device("cpu"), 1 << 22, rounds=2) < 1e13


@pytest.mark.slow
def test_a_mixture_of_experts_runs_through_it(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", MIXTURE)
    monkeypatch.setattr(rivals, "vllm_command", lambda python: fake(tmp_path))
    decode.main(
        args_for(
            tmp_path, "--formats", "bf16", "fp8", "nvfp4", "int4", "--parts", "rollout", "agreement"
        )
    )
    rows = stored(tmp_path)
    for format, most in (("bf16", 0.05), ("fp8", 0.2), ("nvfp4", 0.5), ("int4", 0.5)):
        assert rows[f"tiny {format}: |delta log-prob| to the learner, mean"].ours < most
        one, four = (
            rows[f"tiny {format} B={batch}: experts touched by a step"] for batch in (1, 4)
        )
        assert one.ours == 2 and one.met and one.peer == pytest.approx(4 * (1 - (3 / 4) ** 2))
        assert (
            2 < four.ours <= 4
            and four.unit == "of 4"
            and four.must == pytest.approx(0.95 * 4 * (1 - 0.5**4))
        )
        assert rows[f"tiny {format} B=4: rollout"].ratio > 0


def test_random_weights_repeat() -> None:
    one, two, other = (random_model(TINY, seed=seed) for seed in (1, 1, 2))
    weights = one.blocks[1].down.weight
    assert torch.equal(weights, two.blocks[1].down.weight) and not torch.equal(
        weights, other.blocks[1].down.weight
    )
    assert 0.017 < float(weights.float().std()) < 0.023 and not weights.requires_grad
    assert torch.equal(one.norm.weight, torch.ones(32)) and not one.blocks[0].qkv.bias.any()


def test_rows_of_parts_are_merged_and_those_of_another_machine_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.merge(
        "decode", [Row("a", "s", 1.0), Row("b", "s", 2.0, 4.0, 2.0, (1.9, 2.1))], tmp_path, rounds=3
    )
    harness.merge("decode", [Row("a", "s", 5.0)], tmp_path, bandwidth=7.0)
    rows = stored(tmp_path)
    assert rows["a"].ours == 5.0 and rows["b"].spread == (1.9, 2.1)
    harness.merge("order", [Row(f"m B={batch}", "s", 1.0) for batch in (256, 8, 64)], tmp_path)
    names = [row["name"] for row in json.loads((tmp_path / "order.json").read_text())["rows"]]
    assert names == ["m B=8", "m B=64", "m B=256"]
    assert json.loads((tmp_path / "decode.json").read_text())["settings"] == {
        "rounds": 3,
        "bandwidth": 7.0,
    }
    before = harness.machine()
    monkeypatch.setattr(harness, "machine", lambda: {**before, "gpu": "another"})
    harness.merge("decode", [Row("c", "s", 1.0)], tmp_path)
    assert set(stored(tmp_path)) == {"c"}


def test_goals() -> None:
    seconds = Row("x", "s", 9.0, must=20.0, aim=8.0, goal="ours at most")
    assert seconds.met and not seconds.reaches(seconds.aim) and seconds.verdict == "met"
    assert Row("x", "", 0.6, must=0.7, goal="ours at least").verdict == "missed"
    assert Row("x", "", None, must=0.7).verdict == "not run" and Row("x", "", None).verdict == ""
    assert Row("x", "MB", 1, 2, 0.5, must=0.6, goal="ratio at most").met


def test_targets_fit_their_rows() -> None:
    names = [name for target in targets.TARGETS for name in target.rows]
    assert len(set(names)) == len(names)
    for target in targets.TARGETS:
        assert len(target.rows) == len(target.must) == len(target.aim)
        harder = [
            a > m if target.goal.endswith("least") else a < m
            for m, a in zip(target.must, target.aim, strict=True)
            if m is not None and a is not None
        ]
        assert all(harder), target.quantity
    titles = [job.title for job in train.JOBS.values()]
    for beginning in targets.REASONS:  # a reason of no row would never be shown
        assert any(name.startswith(beginning) for name in names) or any(
            map(beginning.startswith, titles)
        ), beginning
    (row,) = targets.aimed(
        [Row(targets.rollout(targets.batch_of("qwen2.5-7b", "nvfp4", 256)), "tokens/s", 1.0)]
    )
    assert (row.must, row.aim) == (1.4, 2.2)


def test_the_table_of_targets_says_what_was_missed_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(decode.__file__).parents[1]
    spec = importlib.util.spec_from_file_location("tables", root / "docs" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert "yet: run `make bench-gpu`" in tables.targets() and tables.gpu() == tables.NOT_RUN
    rows = [
        Row(
            targets.rollout(targets.batch_of("qwen2.5-7b", "bf16", batch)),
            "tokens/s",
            10.0 * batch,
            5.0 * batch,
            ratio,
            (1, 3),
            note="in turns",
        )
        for batch, ratio in ((1, 1.5), (64, 0.9), (256, 1.4))
    ]
    monkeypatch.setattr(
        targets,
        "REASONS",
        dict.fromkeys((row.name for row in rows), "waits for the host")
        | {
            "learner, spee": "the products",
            targets.rollout(targets.batch_of("qwen2.5-7b", "fp8", 1)): "never shown",
        },
    )
    folder = tmp_path / "bench" / "baselines"
    harness.merge("decode", targets.aimed(rows), folder, vllm="0.24.0")
    harness.merge(
        "train",
        [
            Row("learner, memory", "GB", 5.0, 10.0, 0.5, None, 0.6, 0.4, "ratio at most"),
            Row("learner, speed (2 x rows/2)", "tokens/s", 5.0, 5.0, 1.0, None, 1.3, 1.6),
        ],
        folder,
    )
    harness.merge(
        "decode",
        [
            Row(
                targets.rollout(targets.batch_of("qwen2.5-7b", "fp8", 1)),
                "tokens/s",
                5.0,
                must=1.1,
                note="no vLLM",
            )
        ],
        folder,
    )
    lines = tables.targets().splitlines()
    assert "vLLM 0.24.0 (decode)." in lines[0]
    wanted = (
        "B = 1 / 64 / 256 | 10 / 640 / 2,560 | 5 / 320 / 1,280 | 1.5 / 0.9 / 1.4 "
        "| 1.15 / 1.1 / 1.25 | 1.3 / 1.3 / 1.4 | met / missed / met: waits for the host |"
    )
    assert sum(line.endswith(wanted) for line in lines) == 1
    assert lines[-2] == "| learner, memory, GB | 5 | 10 | 0.5 | 0.6 | 0.4 | met |"
    assert lines[-1].endswith(
        "(2 x rows/2), tokens/s | 5 | 5 | 1 | 1.3 | 1.6 | missed: the products |"
    )
    assert sum(
        line.endswith("| not run: no vLLM |") for line in lines
    ) == 1 and "never shown" not in "".join(lines)
    assert "ratio at most 0.6" in tables.gpu() and "1.50x (1.00 to 3.00)" in tables.gpu()
    assert "decode" not in tables.measured()
