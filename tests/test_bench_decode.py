"""The decoding benchmark measures what it says: turns with fresh prompts, a peer that may fail, honest sums."""
from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import decode, lengths, record, roofline, startup, step, targets, vllm_worker
from bench.decode import Times, Work, measure
from bench.peer import Peer, PeerFailed
from bench.record import Row
from bench.shapes import SHAPES, random_model
from lowroll import Engine

TINY = {**SHAPES["qwen2.5-1.5b"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 128}
WORK = Work(prompt_tokens=6, new_tokens=5, group=4)

# Speaks the worker's protocol without vLLM: {mode} is how it goes wrong.
FAKE = """
import json, sys, time
sys.path.insert(0, {root!r})
from bench.vllm_worker import serve
def load(settings):
    calls = []
    def generate(prompts, new_tokens):
        calls.append(prompts)
        print("call", len(calls), file=sys.stderr)
        if {mode!r} == "dies" and len(calls) > {after}: sys.exit(3)
        if {mode!r} == "hangs" and len(calls) > {after}: time.sleep(60)
        return len(prompts) * new_tokens - ({mode!r} == "short")
    if {mode!r} == "refuses": raise ValueError("no kernel for " + settings["format"])
    return generate, {{"ready": True, "seconds": 2.5, "vllm": "0.24.0"}}
serve(sys.stdin, lambda answer: print(json.dumps(answer), flush=True), load)
"""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return "tiny"


def fake(folder: Path, mode: str = "", after: int = 0) -> list[str]:
    script = folder / "worker.py"
    script.write_text(FAKE.format(root=str(Path(decode.__file__).parents[1]), mode=mode, after=after))
    return [sys.executable, str(script)]


# -- the peer ---------------------------------------------------------------------------------------------------------

def test_a_peer_answers_and_ends(tmp_path: Path) -> None:
    with Peer({"format": "bf16"}, fake(tmp_path), start_s=60) as peer:
        assert peer.ready["seconds"] == 2.5
        assert 0 <= peer.generate([[1, 2], [3, 4]], copies=3, new_tokens=7) < 5
    assert peer._process.returncode == 0


@pytest.mark.parametrize(("mode", "said"), [("dies", "ended with 3, waiting for 2 responses of 5 tokens.*call 1"),
                                            ("hangs", "no answer within 0.5 s, waiting for 2 responses of 5 tokens"),
                                            ("short", "9 tokens instead of 2 x 5")])
def test_a_peer_that_goes_wrong_says_what_was_waited_for(tmp_path: Path, mode: str, said: str) -> None:
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
    seen: list[list[list[int]]] = []
    lines = [json.dumps({"a": 1}), json.dumps({"prompts": [[1], [2]], "copies": 2, "new_tokens": 3})]
    vllm_worker.serve(lines, said.append, lambda settings: (
        lambda prompts, new: seen.append(prompts) or len(prompts) * new, {"ready": settings["a"]}))
    assert seen == [[[1], [1], [2], [2]]]
    assert said[0] == {"ready": 1} and said[1]["tokens"] == 12 and 0 <= said[1]["seconds"] < 1


def test_the_worker_knows_the_formats() -> None:
    assert vllm_worker.config(TINY, "bf16") == TINY and set(decode.FORMATS) <= set(vllm_worker.FORMATS)
    quantized = vllm_worker.config(TINY, "nvfp4")["quantization_config"]
    group = quantized["config_groups"]["group_0"]
    assert quantized["format"] == "nvfp4-pack-quantized" and quantized["ignore"][0] == "lm_head"
    assert group["weights"]["group_size"] == 16 and group["input_activations"] is None
    fp8 = vllm_worker.config(TINY, "fp8")["quantization_config"]["config_groups"]["group_0"]
    assert fp8["weights"]["type"] == "float" and fp8["input_activations"]["dynamic"] is True


# -- turns ------------------------------------------------------------------------------------------------------------

def test_sides_take_turns_with_the_same_fresh_prompts() -> None:
    calls: list[tuple[str, str, int, int]] = []

    def side(name: str) -> decode.Generate:
        def generate(prompts: list[list[int]], copies: int, new_tokens: int) -> float:
            calls.append((name, str(prompts), copies * len(prompts), new_tokens))
            return 2.0 if new_tokens == 5 else 0.4
        return generate

    times = measure({"ours": side("ours"), "vllm": side("vllm")}, WORK, 8, 512, rounds=3)
    assert [name for name, *_ in calls] == ["ours", "vllm"] * 8                  # 2 warm-ups, 3 rounds of 2 calls
    assert all(a[1:] == b[1:] for a, b in zip(calls[::2], calls[1::2], strict=True))
    assert len({prompts for _, prompts, *_ in calls}) == 8 and {batch for _, _, batch, _ in calls} == {8}
    assert [new for *_, new in calls[4::2]] == [5, 1] * 3
    assert times["vllm"].step_ms(5) == pytest.approx(400.0) and len(times["ours"].whole) == 3
    measure({"ours": side("later")}, WORK, 4, 512, rounds=1)
    assert not {c[1] for c in calls if c[0] == "later"} & {c[1] for c in calls if c[0] == "ours"}


def test_a_batch_is_groups_of_equal_prompts() -> None:
    prompts, copies = Work().prompts(64, 152064, 3)
    assert len(prompts) == 8 and copies == 8 and {len(ids) for ids in prompts} == {256}
    assert Work().prompts(1, 152064, 3)[1] == 1 and len(Work().prompts(1, 152064, 3)[0]) == 1
    assert all(1520 <= token < 152064 for ids in prompts for token in ids)
    assert Work().cache_tokens(64) > 8 * 256 + 64 * 256


def test_the_rows_of_a_batch(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"ours": Times([1.0, 2.0, 4.0], [0.2] * 3), "vllm": Times([4.0, 3.0, 6.0], [0.4] * 3)}
    whole, step, roof = decode.rollout_rows("qwen2.5-7b", "bf16", 64, Work(), times, 4.27e12, [])
    assert (whole.ours, whole.peer, whole.ratio, whole.spread) == (8192.0, 4096.0, 1.5, (1.5, 4.0))
    assert (whole.must, whole.aim, whole.verdict) == (1.1, 1.3, "met")
    assert step.ours == pytest.approx(1.8e3 / 255) and step.ratio == pytest.approx(3.6 / 1.8)
    ideal = (14.14e9 + 64 * 384 * 57344) / 4.27e12
    assert roof.ours == pytest.approx(ideal / (1.8 / 255), rel=1e-3) and roof.verdict == "missed"
    assert roof.peer == pytest.approx(roof.ours / 2)
    alone = decode.rollout_rows(tiny, "bf16", 4, WORK, {"ours": times["ours"]}, 1e9, ["vLLM: not run (gone)"])
    assert [row.peer for row in alone] == [None] * 3 and {row.note for row in alone} == {"vLLM: not run (gone)"}


# -- the whole command, at tiny sizes ---------------------------------------------------------------------------------

def args_for(folder: Path, *words: str) -> list[str]:
    return ["--models", "tiny", "--batches", "1,4", "--rounds", "1", "--device", "cpu", "--out", str(folder), *words]


@pytest.fixture
def small(tiny: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decode, "Work", lambda: WORK)
    monkeypatch.setattr(decode, "bandwidth", lambda device: 1e10)
    yield


def stored(folder: Path) -> dict[str, Row]:
    rows = [record.read_row(row) for row in json.loads((folder / "decode.json").read_text())["rows"]]
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


def test_the_command_with_a_peer(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "vllm_command", lambda python: fake(tmp_path))
    assert decode.main(args_for(tmp_path, "--formats", "bf16", "int8", "--parts", "rollout", "agreement")) == 0
    rows = stored(tmp_path)
    for format in ("bf16", "int8"):
        assert rows[f"tiny {format} B=4: rollout"].ratio > 0
        assert rows[f"tiny {format} B=1: decode step"].peer is not None
        assert rows[f"tiny {format}: same seed, same tokens"].met
        assert rows[f"tiny {format}: engine made, weights in memory"].peer == 2.5
        mean, tail = (rows[f"tiny {format}: |delta log-prob| to the learner, {n}"].ours for n in ("mean", "p99.9"))
        assert 0 < mean < tail < 0.2
    assert json.loads((tmp_path / "decode.json").read_text())["settings"]["vllm"] == "0.24.0"


def test_a_peer_that_dies_leaves_ours(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "vllm_command", lambda python: fake(tmp_path, "dies", after=5))
    decode.main(args_for(tmp_path, "--formats", "bf16", "--parts", "rollout"))
    rows = stored(tmp_path)
    assert rows["tiny bf16 B=1: rollout"].peer is not None
    lonely = rows["tiny bf16 B=4: rollout"]
    assert lonely.ours > 0 and lonely.peer is None and "vLLM: not run (it ended with 3" in lonely.note


def test_without_a_peer_the_rows_say_so(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "vllm_command", lambda python: fake(tmp_path, "refuses"))
    decode.main(args_for(tmp_path, "--formats", "int8", "--parts", "rollout"))
    assert "no kernel for int8" in stored(tmp_path)["tiny int8 B=1: rollout"].note
    decode.main(args_for(tmp_path, "--formats", "bf16", "--parts", "rollout", "--peer", "none"))
    rows = stored(tmp_path)                         # what the first command stored is still there
    assert {row.note for name, row in rows.items() if "B=1" in name and "bf16" in name} == {
        "vLLM: not run (not asked for)"}
    assert rows["tiny int8 B=1: rollout"].ours > 0


def test_engines_that_do_not_fit_run_one_after_the_other(small: None, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    args = decode.arguments(args_for(tmp_path, "--formats", "bf16", "--parts", "rollout"))
    monkeypatch.setattr(decode, "vllm_command", lambda python: fake(tmp_path))
    monkeypatch.setattr(decode, "fit_together", lambda *_: False)
    rows: list[Row] = []
    decode.compare("tiny", "bf16", WORK, args, 1e10, lambda new, **_: rows.extend(new))
    assert all("one after the other" in row.note for row in rows if "B=" in row.name)
    assert [row.peer is not None for row in rows] == [True] * 7


def test_first_token_of_a_folder_in_a_new_process(tiny: str) -> None:
    ready, imports = startup.rows("tiny", "int8", torch.device("cpu"))
    assert ready.name == targets.first_token("tiny", "int8") and 0 < ready.ours < 30 and 0 < imports.ours < 60


# -- lengths ----------------------------------------------------------------------------------------------------------

def test_lengths_are_forced_and_skewed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = lengths.Lengths.drawn("gsm8k-like", 1000)
    counts = sorted(n for row in drawn.tokens for n in row)
    assert len(counts) == 512 and 200 < counts[256] < 240 and 1.1 < drawn.total / 512 / 220 < 1.3
    longer = sorted(n for row in lengths.Lengths.drawn("math-like", 1000).tokens for n in row)
    assert 195 < longer[256] < 255 and longer[-1] <= 2048
    engine = Engine(random_model(TINY), "bf16", device="cpu", cache_tokens=2048, max_batch=16)
    work = lengths.Lengths([[5, 6, 7], [8, 9, 10]], [[3, 1, 9], [4, 2, 5]])
    assert lengths.run(engine, work) == lengths.run(engine, work) == 24


# -- a whole step -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rank", [None, 4])
def test_a_step_is_split_into_its_parts(tiny: str, rank: int | None) -> None:
    case = step.Case(tiny, "int8", rank, prompts=2, samples=4, prompt_tokens=5, new_tokens=4)
    loop = step.Loop(case, torch.device("cpu"))
    before = {name: p.detach().clone() for name, p in loop.model.trainable_parameters().items()}
    run = step.Forward.run
    loop.step()
    loop.settings = dataclasses.replace(loop.settings, minibatches=2)       # now the proximal log-probs take a pass
    seconds = loop.step()
    assert step.Forward.run is run
    assert all(seconds[part] > 0 for part in ("generate", "score", "log-prob", "update", "publish"))
    assert set(seconds) == set(step.PARTS) and seconds["idle"] >= 0
    assert any(not torch.equal(p, before[name]) for name, p in loop.model.trainable_parameters().items())
    assert loop.engine.behavior.policy[-1].version == 2


def test_the_step_command(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step.CASES, "tiny", step.Case(tiny, "fp8", prompts=2, samples=2, prompt_tokens=5, new_tokens=4))
    assert step.main(["--cases", "tiny", "--steps", "2", "--publish", "tiny:int8", "--device", "cpu",
                      "--out", str(tmp_path)]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "step.json").read_text())["rows"]}
    parts = [rows[f"tiny all weights, fp8 rollouts: {part}"]["ours"] for part in (*step.PARTS, "whole step")]
    assert sum(parts[:-1]) == pytest.approx(parts[-1], rel=0.5)
    assert rows["tiny publish bf16 to int8 in place"]["ours"] > 0


# -- sums -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("model", "format", "gigabytes"), [
    ("qwen2.5-1.5b", "bf16", 3.09), ("qwen2.5-7b", "bf16", 14.14), ("qwen2.5-7b", "fp8", 7.62),
    ("qwen2.5-7b", "nvfp4", 4.76), ("qwen2.5-32b", "int8", 32.76), ("qwen2.5-32b", "nvfp4", 19.11),
    ("qwen3-30b-a3b", "bf16", 60.4)])
def test_bytes_of_a_step(model: str, format: str, gigabytes: float) -> None:
    assert roofline.weight_bytes(SHAPES[model], format) / 1e9 == pytest.approx(gigabytes, rel=3e-3)
    assert roofline.kv_bytes_per_token(SHAPES["qwen2.5-7b"]) == 57344
    more = roofline.step_bytes(SHAPES[model], format, 64, 100) - roofline.weight_bytes(SHAPES[model], format)
    if "a3b" not in model:
        assert more == 6400 * roofline.kv_bytes_per_token(SHAPES[model])


def test_a_step_reads_the_experts_that_its_rows_touch() -> None:
    config = SHAPES["qwen3-30b-a3b"]
    every, one, eight = (roofline.linear_weights(config, batch) for batch in (None, 1, 8))
    experts = 48 * 3 * 2048 * 768           # weights of one expert in every layer
    assert one == pytest.approx(every - 120 * experts)
    assert (eight - one) / experts == pytest.approx(51.6 - 8, abs=0.1)      # 128 (1 - (15/16)^8) = 51.6


def test_bandwidth_of_this_machine() -> None:
    assert 1e8 < roofline.bandwidth(torch.device("cpu"), 1 << 22, rounds=2) < 1e13


def test_a_mixture_of_experts_runs_through_it(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {name: TINY[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                                           "num_key_value_heads", "vocab_size", "max_position_embeddings")}
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["qwen3-30b-a3b"], **sizes, "head_dim": 16, "num_experts": 4,
                                         "num_experts_per_tok": 2, "moe_intermediate_size": 32})
    assert decode.main(args_for(tmp_path, "--formats", "bf16", "--parts", "rollout", "agreement", "--peer",
                                "none")) == 0
    assert stored(tmp_path)["tiny bf16: |delta log-prob| to the learner, mean"].ours < 0.05


def test_random_weights_repeat() -> None:
    one, two, other = (random_model(TINY, seed=seed) for seed in (1, 1, 2))
    weights = one.blocks[1].down.weight
    assert torch.equal(weights, two.blocks[1].down.weight) and not torch.equal(weights, other.blocks[1].down.weight)
    assert 0.017 < float(weights.float().std()) < 0.023 and not weights.requires_grad
    assert torch.equal(one.norm.weight, torch.ones(32)) and not one.blocks[0].qkv.bias.any()


def test_rows_of_parts_are_merged_and_those_of_another_machine_are_not(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    record.merge("decode", [Row("a", "s", 1.0), Row("b", "s", 2.0, 4.0, 2.0, (1.9, 2.1))], tmp_path, rounds=3)
    record.merge("decode", [Row("a", "s", 5.0)], tmp_path, bandwidth=7.0)
    rows = stored(tmp_path)
    assert rows["a"].ours == 5.0 and rows["b"].spread == (1.9, 2.1)
    record.merge("order", [Row(f"m B={batch}", "s", 1.0) for batch in (256, 8, 64)], tmp_path)
    names = [row["name"] for row in json.loads((tmp_path / "order.json").read_text())["rows"]]
    assert names == ["m B=8", "m B=64", "m B=256"]
    assert json.loads((tmp_path / "decode.json").read_text())["settings"] == {"rounds": 3, "bandwidth": 7.0}
    before = record.machine()
    monkeypatch.setattr(record, "machine", lambda: {**before, "gpu": "another"})
    record.merge("decode", [Row("c", "s", 1.0)], tmp_path)
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
        harder = [a > m if target.goal.endswith("least") else a < m
                  for m, a in zip(target.must, target.aim, strict=True)]
        assert all(harder), target.quantity
    row, = targets.aimed([Row(targets.rollout("qwen2.5-7b", "nvfp4", 256), "tokens/s", 1.0)])
    assert (row.must, row.aim) == (1.4, 2.2)


def test_the_table_of_targets_says_what_was_missed_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(decode.__file__).parents[1]
    spec = importlib.util.spec_from_file_location("tables", root / "docs" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert "yet: run `make bench-gpu`" in tables.targets() and tables.gpu() == tables.NOT_RUN
    rows = [Row(targets.rollout("qwen2.5-7b", "bf16", batch), "tokens/s", 10.0 * batch, 5.0 * batch, ratio, (1, 3),
                note="waits for the host" if ratio < 1.1 else "") for batch, ratio in ((1, 1.5), (64, 0.9), (256, 1.4))]
    folder = tmp_path / "bench" / "baselines"
    record.merge("decode", targets.aimed(rows), folder, vllm="0.24.0")
    record.merge("train", [Row("learner, memory", "GB", 5.0, 10.0, 0.5, None, 0.6, 0.4, "ratio at most")], folder)
    lines = tables.targets().splitlines()
    assert "vLLM 0.24.0 (decode)." in lines[0]
    wanted = ("B = 1 / 64 / 256 | 10 / 640 / 2,560 | 5 / 320 / 1,280 | 1.5 / 0.9 / 1.4 | 1.1 / 1.1 / 1.4 | "
              "1.2 / 1.3 / 1.8 | met / missed / met: waits for the host |")
    assert sum(line.endswith(wanted) for line in lines) == 1
    assert lines[-1] == "| learner, memory, GB | 5 | 10 | 0.5 | 0.6 | 0.4 | met |"
    assert "ratio at most 0.6" in tables.gpu() and "1.50x (1.00 to 3.00)" in tables.gpu()
    assert "decode" not in tables.measured()
