"""The benchmark of caches places samples where it says, counts every token, and compares equal
batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import harness, kv, peer, targets
from bench.harness import Row
from bench.kv import Cache, Measured, Memory, spread
from bench.placed import Compacting, Placed
from bench.shapes import SHAPES, random_model
from lowroll import Engine
from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.table import make
from tests.bench.workers import fake
from tests.fixtures.scheduling import running_samples
from tests.fixtures.shapes import TINY as ONE_LAYER

TINY = {**ONE_LAYER, "num_hidden_layers": 2, "max_position_embeddings": 512}
RKV = make("rkv", budget=24, buffer=8, window=3, kernel=3)
SMALL = {
    "dense": Cache(),
    "fp8": Cache(kv_dtype="fp8"),
    "rkv": Cache(RKV),
    "rkv+fp8": Cache(RKV, "fp8"),
    "snapkv": Cache(make("snapkv", budget=24, buffer=8, window=3, kernel=3)),
    "streaming": Cache(make("streaming", budget=24, buffer=8)),
    "h2o": Cache(make("h2o", budget=24, buffer=8), only=2),
}


def placed(policy: CachePolicy, max_batch: int = 4, tokens: int = 4096) -> Placed:
    options = {"cache_tokens": tokens, "max_batch": max_batch, "max_prefill_tokens": 1 << 30}
    return Placed(Engine(random_model(TINY), weights="bf16", kv=policy, device="cpu", **options))


# -- samples that are placed -----------------------------------------------------------------------


def test_samples_stand_at_their_contexts_over_noise() -> None:
    side = placed(DENSE)
    side.stand([100, 37, 64], 20)
    rows = running_samples(side.engine.scheduler)
    assert [row.cached_len for row in rows] == [100, 37, 64] and side.cached() == 67
    assert [row.position for row in rows] == [100, 37, 64]
    cache = side.engine.runner.cache
    for row in rows:
        slots_T = torch.tensor([p * 16 + i for p in row.pages for i in range(16)])[: row.cached_len]
        for layer in range(2):
            for x_TGd in cache.read(layer, slots_T):
                assert 0.8 < x_TGd.float().std() < 1.2 and (x_TGd != 0).float().mean() > 0.99
    assert side.step_ms(6) > 0 and {row.cached_len - row.position for row in rows} == {0}
    assert [len(row.token_ids) for row in rows] == [7] * 3
    side.clear()
    assert side.engine.pool.num_used == 0 and not side.engine.has_work


def test_a_row_that_ended_is_no_steady_state() -> None:
    side = placed(DENSE)
    side.stand([10, 10], 5)
    with pytest.raises(RuntimeError, match="0 rows decode instead of 2"):
        side.step_ms(4)
    crowded = placed(DENSE, tokens=64)
    with pytest.raises(RuntimeError, match="1 rows decode instead of 2"):
        crowded.stand([40, 40], 1000 - 990)


@pytest.mark.parametrize("name", ["rkv", "snapkv", "streaming", "h2o"])
def test_a_bounded_row_behind_a_long_context(name: str) -> None:
    """The prompt is compacted, its pages come back, and tokens stand at their true positions."""
    side = placed(SMALL[name].kv, tokens=640)  # the prompts enter one after the other
    side.stand([400] * 4, 64)
    side.step_ms(8)
    rows = running_samples(side.engine.scheduler)
    assert all(24 <= row.cached_len <= 32 and row.position > 400 for row in rows)
    assert side.engine.pool.num_used <= 4 * 2
    assert side.engine.stats().prefix_hits == 0  # no prompt is another one's


# -- arithmetic ------------------------------------------------------------------------------------


def test_the_largest_batch_is_by_the_worst_case() -> None:
    memory = Memory(token_bytes=57344, state_bytes=1e6, free=120e9)
    assert memory.rows(DENSE, 16384) == int((120e9 - 2e6) / (32768 * 57344 + 1e6)) == 63
    rkv = make("rkv", budget=512, buffer=128)
    assert memory.rows(rkv, 16384) == memory.rows(rkv, 4096) == kv.MOST_ROWS
    each = (256 + 640) * 57344 + 1e6  # its prompt's pages beside those of its longest cache
    assert Memory(57344, 1e6, 10 * each + 3e6).rows(rkv, 4096) == 10
    assert spread(rkv, 64)[:3] == [512, 514, 516] and max(spread(rkv, 1024)) == 639


def test_ratios_are_of_medians_and_rounds() -> None:
    ours, dense = Measured(64, [5.0, 4.0, 6.0], 576), Measured(64, [20.0, 15.0, 30.0], 16384)
    assert ours.over(dense) == (4.0, (2.5, 7.5)) and ours.tokens_per_s == 12800
    cost = Compacting(samples=8, calls=2, seconds=0.02, whole=1.0)
    assert cost.ms == 2.5 and cost.share == 0.02


def test_targets_name_rows_of_this_table() -> None:
    name = targets.over_dense("qwen2.5-7b", "bf16", "rkv", 64, 16384)
    assert name == "qwen2.5-7b bf16 rkv 16k B=64: decode step over dense"
    wanted = {t.quantity: t for t in targets.TARGETS if t.file == "kv"}
    assert len(wanted) == 8 and sum(name in t.rows for t in wanted.values()) == 1
    slow, greedy = targets.aimed(
        [
            Row(name, "ms", 5.0, 10.0, 2.0),
            Row(targets.compacting("qwen2.5-7b", "bf16", "rkv", 64), "fraction", 0.04),
        ]
    )
    assert (slow.must, slow.aim, slow.verdict) == (3.0, 4.5, "missed") and greedy.met
    full = targets.fullest("qwen2.5-7b", "nvfp4", "rkv", 16384)
    assert targets.aimed([Row(full, "tokens/s", 9.0, 2.0, 4.5)])[0].verdict == "met"


# -- the whole command, at tiny sizes --------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    for name, value in (
        ("CACHES", SMALL),
        ("GROWN_STEPS", 4),
        ("PROMPT", 16),
        ("CONTEXT", 512),
        ("MOST_ROWS", 12),
        ("PEER_TOKENS", 5),
        ("bandwidth", lambda device: 1e10),
        ("free_room", lambda device: 2048 * 128.0),  # tokens of a cache
    ):
        monkeypatch.setattr(kv, name, value)
    yield


def run(folder: Path, *words: str) -> tuple[dict[str, Row], int]:
    fixed = ["--model", "tiny", "--weights", "bf16", "--contexts", "64,128", "--batches", "2,40"]
    code = kv.main([*fixed, "--rounds", "1", "--device", "cpu", "--out", str(folder), *words])
    stored = json.loads((folder / "kv.json").read_text())
    return {row["name"]: harness.read_row(row) for row in stored["rows"]}, code


@pytest.mark.slow
def test_the_command(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, code = run(tmp_path, "--caches", "rkv", "streaming", "h2o", "--parts", *kv.PARTS)
    assert code == 0 and str(tmp_path / "kv.json") in capsys.readouterr().out
    dense = rows["tiny bf16 dense 64 B=2: decode step"]
    ours = rows["tiny bf16 rkv 64 B=2: decode step over dense"]
    assert ours.peer == dense.ours and ours.ratio == pytest.approx(dense.ours / ours.ours)
    # 2,048 tokens do not hold 40 rows: there it is as many as fit
    dense = {name.split(":")[0] for name in rows if "dense" in name.split()[2]}
    cases = ("64 B=2", "64 B=16", "64, largest batch", "128 B=2", "128 B=8", "128, largest batch")
    assert dense == {f"tiny bf16 dense {case}" for case in cases}
    assert rows["tiny bf16 rkv 128 B=8: decode step over dense"].ratio
    for name in ("rkv", "streaming"):
        assert rows[f"tiny bf16 {name} B=40: fraction of the bandwidth roofline"].ours > 0
        assert 0 < rows[f"tiny bf16 {name} B=2: compactions' share of decoding"].ours < 1
        assert rows[f"tiny bf16 {name} B=2: compaction, a sample"].note == "2 samples in 2 turns"
        assert rows[f"tiny bf16 {name} 128, largest batch: rows"].peer == 8
        most = rows[f"tiny bf16 {name} 128, largest batch: tokens/s"]
        assert most.ratio and most.note == "12 rows, the dense cache 8"
    assert {name.split("B=")[1][:2] for name in rows if "h2o" in name} == {"2:"}
    assert {
        "tiny bf16 rkv B=2 in step: decode step",
        "tiny bf16 rkv B=2 in step at 128: decode step",
    } <= set(rows)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_vllm_runs_last_at_the_same_batches(
    dies: bool, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = fake(tmp_path, "dies" if dies else "")
    monkeypatch.setattr(peer, "vllm_command", lambda: command)
    words = ("--caches", "streaming", "--parts", "equal", "--peer", "vllm")
    rows, _ = run(tmp_path, *words)
    names = {name for name in rows if "over vLLM" in name}
    if dies:
        assert names == {"tiny bf16 over vLLM"}
        assert "it ended with 3" in rows["tiny bf16 over vLLM"].note
        return
    assert len(names) == 8  # two contexts, two batches of each, two caches
    assert rows["tiny bf16 streaming 128 B=8: decode step over vLLM"].peer is not None
