"""The decoding benchmark measures what it says: turns with fresh prompts, a peer that may fail,
honest sums."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import (
    decode,
    harness,
    lengths,
    peer,
    rivals,
    roofline,
    step,
    targets,
    train,
    turns,
    work,
)
from bench.harness import Row
from bench.peer import Peer, PeerFailed
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
    words = ["CUDA out of memory", *"abcde", "y" * 900]
    dies = f"import sys; sys.exit({chr(10).join(words)!r})"
    with pytest.raises(
        PeerFailed, match=r"last words: CUDA out of memory \| c \| d \| e \| y{300}$"
    ):
        Peer({}, [sys.executable, "-c", dies])


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
    monkeypatch.setattr(rivals, "version", lambda: "0.26.0")
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
    monkeypatch.setattr(peer, "vllm_command", lambda: fake(tmp_path))
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
def test_without_a_peer_the_rows_say_so(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "vllm_command", lambda: fake(tmp_path, "refuses"))
    decode.main(args_for(tmp_path, "--formats", "int8", "--parts", "rollout"))
    assert "no kernel for int8" in stored(tmp_path)["tiny int8 B=1: rollout"].note
    decode.main(args_for(tmp_path, "--formats", "bf16", "--parts", "rollout", "--peer", "none"))
    rows = stored(tmp_path)  # what the first command stored is still there
    assert {row.note for name, row in rows.items() if "B=1" in name and "bf16" in name} == {
        "vLLM: not run (not asked for)"
    }
    assert rows["tiny int8 B=1: rollout"].ours > 0


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
    drawn = lengths.Lengths.drawn(1000, 220, 0.6, 2048, 512)
    counts = sorted(n for row in drawn.tokens for n in row)
    assert len(counts) == 512 and 200 < counts[256] < 240 and 1.1 < drawn.total / 512 / 220 < 1.3
    math_like = lengths.Lengths.drawn(1000, 900, 0.87, 8192, 512, shrink=4)
    longer = sorted(n for row in math_like.tokens for n in row)
    assert 195 < longer[256] < 255 and longer[-1] <= 2048
    engine = Engine(random_model(TINY), "bf16", device="cpu", cache_tokens=2048, max_batch=16)
    work = lengths.Lengths([[5, 6, 7], [8, 9, 10]], [[3, 1, 9], [4, 2, 5]])
    assert lengths.run(engine, work) == lengths.run(engine, work) == 24


# -- a whole step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 4])
def test_a_step_is_split_into_its_parts(tiny: str, rank: int | None) -> None:
    case = step.Case(tiny, "int8", rank, Work(8, 5, 4, 4))
    loop = step.Loop(case, torch.device("cpu"))
    before = {name: p.detach().clone() for name, p in loop.model.trainable_parameters().items()}
    run = step.PackedForward.run
    loop.step()
    loop.settings = dataclasses.replace(
        loop.settings, minibatches=2
    )  # now the proximal log-probs take a pass
    seconds = loop.step()
    assert step.PackedForward.run is run
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
        step.Case(tiny, "fp8", work=Work(4, 5, 4, 2)),
    )
    monkeypatch.setattr(step, "PUBLISHED", (tiny, "int8"))
    words = f"--cases tiny --steps 2 --device cpu --out {tmp_path}"
    assert step.main(words.split()) == 0
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
    assert roofline.uniform(config, 1) == 8 and roofline.uniform(config, 8) == pytest.approx(
        51.6, abs=0.1
    )
    assert roofline.simulated(config, 1) == pytest.approx(
        7.78, abs=0.01
    )  # 8 draws, some of them the same
    assert decode.dense_bytes("qwen3-30b-a3b", "nvfp4") == 2 * 48 * (
        2048 * (4096 + 2 * 512) + 4096 * 2048
    )


@pytest.mark.slow
def test_a_mixture_of_experts_runs_through_it(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", MIXTURE)
    monkeypatch.setattr(peer, "vllm_command", lambda: fake(tmp_path))
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
        harder = [
            a > m if target.goal.endswith("least") else a < m
            for m, a in target.rows.values()
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
