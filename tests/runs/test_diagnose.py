"""Attribution by hand, engines whose gap has one known cause, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowroll
from lowroll.cli.main import main
from lowroll.config import from_mapping
from lowroll.engine import runner
from lowroll.engine.base import Capabilities
from lowroll.kv.batch import DecodeRows
from lowroll.kv.cache import KVCache
from lowroll.model import hf
from lowroll.model.attention import AttentionInputs
from lowroll.quant.formats import get_format
from lowroll.runs import demo
from lowroll.runs.assembly import native
from lowroll.runs.diagnose import CAUSES, Diagnosis, attribute, diagnose
from tests.fixtures.runs import ALWAYS, TINY, settings, train

TASK = {
    "id": "reverse-text",
    "args": {"template": "{text}", "max_words": 1, "min_len": 3, "max_len": 5},
}
N = torch.tensor([0, 0, 1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with large weights, so that its distributions are far from uniform and rounding
    shows."""
    folder = demo.build_model(tmp_path_factory.mktemp("diagnose") / "model", 0, TINY)
    rough = hf.load(folder)
    with torch.no_grad():
        for _, linear in rough.linears():
            linear.weight.mul_(8)
    return hf.save(rough, folder.parent / "rough", tokenizer_from=folder)


def of(
    model: Path, weights: str, n: int = 2, kv: dict[str, Any] | None = None, **changes: Any
) -> Diagnosis:
    rollout = {"weights": weights, "kv": kv, "max_tokens": 8, "cache_tokens": 1024}
    tree = {
        "model": str(model),
        "device": "cpu",
        "env": [TASK],
        "rollout": rollout | {"exact": False},  # which a bounded cache could not be
    } | changes
    return diagnose(from_mapping(tree), num_prompts=4, n=n)


class Rounding(KVCache):
    """Holds keys and values as e4m3 would, without scales."""

    def write(self, layer: int, slots_T: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> None:
        super().write(layer, slots_T, rounded(k_TGd), rounded(v_TGd))

    def decode(self, layer: int, inputs: AttentionInputs, rows: DecodeRows) -> Tensor:
        k_BGd, v_BGd = rounded(inputs.k_TGd), rounded(inputs.v_TGd)
        return super().decode(layer, inputs._replace(k_TGd=k_BGd, v_TGd=v_BGd), rows)


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


class RoundingEngine(lowroll.Engine):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, kv_dtype="fp8")


def part(diagnosis: Diagnosis, cause: str) -> Any:
    (found,) = (p for p in diagnosis.parts if p.cause == cause)
    return found


def test_parts_by_hand() -> None:
    points = {
        "decode": [-1.0, -2.0, -3.0],
        "prefill": [-1.1, -2.0, -2.9],
        "aligned": [-1.1, -2.0, -2.9],
        "dense": [-1.1, -1.4, -3.2],
    }
    parts, whole = attribute(
        {name: torch.tensor(p, dtype=torch.float64) for name, p in points.items()}, N
    )
    assert [(p.cause, p.start, p.stop) for p in parts] == [
        ("weights", "aligned", "dense"),
        ("kernels", "prefill", "aligned"),
        ("kernels", "decode", "prefill"),
        ("kv", "", ""),
        ("staleness", "", ""),
    ]
    weights, same, decode, kv, stale = parts
    assert weights.kl_k1 == pytest.approx(
        (0 - 0.6 + 0.3) / 3
    ) and weights.logp_diff_mean == pytest.approx(0.3)
    assert weights.logp_diff_max == pytest.approx(0.6) and (
        same.logp_diff_max,
        same.share,
        same.ess,
    ) == (0, 0, 1)
    assert decode.kl_k1 == pytest.approx(0, abs=1e-12) and decode.logp_diff_mean == pytest.approx(
        0.2 / 3
    )
    assert kv == type(kv)("kv", "", "", remark=kv.remark)
    assert stale == type(kv)("staleness", "", "", remark=stale.remark)
    assert [p.share for p in parts] == pytest.approx([0.9 / 1.1, 0, 0.2 / 1.1, 0, 0])
    assert (
        whole.kl_k1
        == pytest.approx((0.1 - 0.6 + 0.2) / 3)
        == pytest.approx(sum(p.kl_k1 for p in parts))
    )
    w = torch.tensor([-0.1, 0.6, -0.2], dtype=torch.float64).exp()
    assert whole.kl_k3 == pytest.approx((w.sum().item() - 0.3 - 3) / 3)
    assert whole.ess == pytest.approx((w.mean() ** 2 / (w**2).mean()).item())


def test_decoding_under_a_cache_that_forgets_or_rounds_is_the_caches_part() -> None:
    points = {
        name: torch.tensor([-1.0, -1.0, p])
        for name, p in (("decode", -2.0), ("prefill", -1.0), ("aligned", -1.0), ("dense", -1.1))
    }
    parts, whole = attribute(points, N, blames_kv=True)
    diagnosis = Diagnosis("m", "fp32", 3, parts, whole)
    assert {p.cause for p in parts if p.logp_diff_max} == {"kv", "weights"}
    assert diagnosis.share("kv") == pytest.approx(1 / 1.1)
    assert diagnosis.reading.startswith("91% of the gap comes from kv: ")


def test_where_activations_are_rounded_every_way_but_the_last_is_rounding_by_hand() -> None:
    points = {
        name: torch.tensor([-1.0, -1.0, p], dtype=torch.float64)
        for name, p in zip(
            ("decode", "prefill", "aligned", "quantized", "dense"),
            (-1.0, -1.3, -1.1, -1.5, -1.6),
            strict=True,
        )
    }
    parts, whole = attribute(points, N)
    assert [(p.cause, p.start, p.stop) for p in parts[:4]] == [
        ("weights", "quantized", "dense"),
        ("rounding", "aligned", "quantized"),
        ("rounding", "prefill", "aligned"),
        ("rounding", "decode", "prefill"),
    ]
    assert [p.share for p in parts[:4]] == pytest.approx([0.1, 0.4, 0.2, 0.3])
    told = Diagnosis("m", "int8", 3, parts, whole).reading
    assert told.startswith("90% of the gap comes from rounding: activations are rounded")
    assert "int8_rotated" in told and "max_kl" not in told
    parts, _ = attribute(points, N, blames_kv=True)
    assert {p.start: p.cause for p in parts if p.share}["decode"] == "kv"


@pytest.mark.parametrize(("gap", "far"), [(0.4, False), (1.0, True)])
def test_a_gap_that_no_correction_pays_for_is_said_to_want_more_bits(gap: float, far: bool) -> None:
    """k3 of a gap g on every token is exp(g) - g - 1: 0.09 and 0.72."""
    points = {name: torch.full((3,), -2.0) for name in ("decode", "prefill", "aligned")}
    points["dense"] = torch.full((3,), -2.0 + gap)
    told = Diagnosis("m", "int4", 3, *attribute(points, N)).reading
    assert ("rollout.weights: {max_kl: 0.02}" in told) == far
    assert ("A KL of 0.72 nats a token" in told) == far


def test_outliers_make_a_gap_of_int8_one_of_rounding(model: Path) -> None:
    """One channel of what each product reads is large, as in pretrained models: a scale a token
    leaves the others few codes. No weight reads it, so the weights' own error stays small."""
    odd = hf.load(model)
    with torch.no_grad():
        for name, p in odd.named_parameters():
            if name.endswith("norm.weight") and p.numel() == odd.spec.hidden_size:
                p[3] *= 60
        for _, linear in odd.linears():
            if linear.in_features == odd.spec.hidden_size:
                linear.weight[:, 3] = 0
    folder = hf.save(odd, model.parent / "odd", tokenizer_from=model)
    plain, found = of(model, "int8"), of(folder, "int8")
    assert found.share("rounding") > 0.8 > plain.share("rounding")
    assert found.reading.startswith(f"{found.share('rounding'):.0%} of the gap comes from rounding")
    assert of(folder, "int4").share("weights") > 0.99


def test_a_float32_engine_has_no_gap(model: Path) -> None:
    diagnosis = of(model, "fp32")
    assert diagnosis.num_tokens >= 8
    assert all(p.logp_diff_max < 1e-4 for p in (*diagnosis.parts, diagnosis.whole))
    assert diagnosis.reading.startswith("engine and learner agree")


@pytest.mark.parametrize("weights", ["int8", "fp8", "fp8_block", "w4a8", "nvfp4", "int4"])
def test_a_low_bit_engines_gap_comes_from_what_it_rounds(model: Path, weights: str) -> None:
    """Weights alone, or weights and activations; of the kernels next to nothing is left."""
    diagnosis = of(model, weights)
    rounds = get_format(weights).rounds_activations
    assert rounds == (weights not in ("nvfp4", "int4"))
    assert diagnosis.share("weights") + diagnosis.share("rounding") > 0.95
    assert (diagnosis.share("rounding") > 0.02) == rounds and diagnosis.share("weights") > 0.3
    assert part(diagnosis, "weights").start == ("quantized" if rounds else "aligned")
    assert part(diagnosis, "weights").logp_diff_max > 1e-3
    assert sum(diagnosis.share(cause) for cause in CAUSES) == pytest.approx(1)
    assert sum(p.kl_k1 for p in diagnosis.parts) == pytest.approx(
        diagnosis.whole.kl_k1, rel=1e-6, abs=1e-9
    )


def test_a_bfloat16_engines_gap_is_its_arithmetic(model: Path) -> None:
    """float32 learner, weights that bfloat16 holds exactly: the linear layers see the same
    weights."""
    exact = hf.load(model)
    with torch.no_grad():
        for _, p in exact.named_parameters():
            p.copy_(p.bfloat16().float())
    folder = hf.save(exact, model.parent / "exact", tokenizer_from=model)
    diagnosis = of(folder, "bf16")
    assert diagnosis.whole.logp_diff_max > 1e-3
    assert diagnosis.share("kernels") > 0.5


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("weights", ["fp32", "int8"])
@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("budget", [None, 999, 12], ids=["dense", "ample", "bounded"])
def test_what_a_cache_forgets_and_rounds_is_named(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    budget: int | None,
    rounds: bool,
    weights: str,
    n: int,
) -> None:
    """Each alone, both, neither; beside weights that have a gap of their own, which stays what it
    is without the cache's."""
    plain = of(model, weights, n)
    bounded = {"policy": "streaming", "budget": budget, "buffer": 2, "sinks": 2}
    kv = ({} if budget is None else bounded) | {"dtype": "fp8" if rounds else "auto"}
    if rounds:
        monkeypatch.setattr(runner, "KVCache", Rounding)
    monkeypatch.setattr(native, "NativeEngine", RoundingEngine if rounds else lowroll.Engine)
    found = of(model, weights, n, kv=kv)
    is_exact = not rounds and budget != 12
    assert part(found, "kv").logp_diff_max == 0 if is_exact else found.share("kv") > 0.05
    assert part(plain, "kv").logp_diff_max == 0 and plain.share("kv") == 0
    same = [p for p in found.parts if p.start in ("decode", "prefill") and p.cause != "kv"]
    assert {p.cause for p in same} == {"kernels" if weights == "fp32" else "rounding"}
    assert len(same) == 1 + is_exact and max(p.logp_diff_max for p in same) < 1e-4
    assert (part(found, "weights").logp_diff_max > 1e-3) == (weights == "int8")
    if is_exact:
        assert (found.parts, found.whole, found.reading) == (
            plain.parts,
            plain.whole,
            plain.reading,
        )
    elif weights == "fp32":
        assert found.share("kv") > 0.95 and "comes from kv: the cache forgets" in found.reading
    assert sum(p.kl_k1 for p in found.parts) == pytest.approx(found.whole.kl_k1, abs=1e-9)
    told = " ".join(found.notes)
    assert ("streaming with a budget of" in told) == (budget is not None)
    assert ("keys and values in fp8" in told) == rounds


def test_an_aligned_learner_is_told_that_it_does_not_pay_for_weights(model: Path) -> None:
    plain, told = of(model, "int8"), of(model, "int8", train={"forward": "aligned"})
    assert plain.whole == told.whole and any(
        "does not pay for weights" in note for note in told.notes
    )


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_learner_that_rounds_otherwise_is_asked_as_it_learns(model: Path, weights: str) -> None:
    """Its forward stands at the end of the way, and is what the rollouts differ from."""
    found = of(model, weights, train={"forward": "fp8"})
    dense = of(model, weights)
    assert (part(found, "weights").stop, found.whole.stop) == ("fp8", "fp8")
    assert found.whole.logp_diff_mean > 1e-3
    assert found.whole.logp_diff_mean != dense.whole.logp_diff_mean
    same = of(model, "fp8", train={"forward": "fp8"})
    assert same.whole.stop == "dense" and "does not pay for weights" in " ".join(same.notes)


def test_a_learner_that_replays_is_told_that_it_sees_what_the_cache_held(model: Path) -> None:
    kv = {"policy": "streaming", "budget": 12, "buffer": 2, "sinks": 2}
    plain, told = (of(model, "fp32", kv=kv, train={"replay_kv": on}) for on in (False, True))
    assert plain.whole == told.whole
    assert [any("train.replay_kv" in note for note in d.notes) for d in (plain, told)] == [0, 1]
    assert "correction auto pays for it" in plain.reading


def test_over_a_shared_base_only_the_arithmetic_is_left(model: Path) -> None:
    diagnosis = of(model, "nvfp4", train={"lora": True, "lora_rank": 4})
    assert diagnosis.whole.logp_diff_max < 1e-4


def test_prefill_scores_are_the_learners_and_disturb_nothing(model: Path) -> None:
    engine = lowroll.Engine(model, weights="fp32", device="cpu", cache_tokens=128)
    request = lowroll.Request(prompt_ids=[5, 6, 7], n=2, max_tokens=6, seed=1)
    alone = engine.generate([request])[0].rollouts
    free = engine.pool.num_free
    handle, done = engine.add(request), []
    engine.step()
    sequences = [[5, 6, 7, *r.token_ids] for r in alone]
    got = engine.score(sequences, [3, 3], 0.7)
    while not done:
        done = engine.step()
    assert done[0][0] == handle and done[0][1].rollouts == alone and engine.pool.num_free == free
    for mine, theirs in zip(got, lowroll.score(model, sequences, [3, 3], 0.7), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    for bad in ([5, 6, 7], [5, 6, 7, 10**6], [1] * 10**4):
        with pytest.raises(ValueError, match=r"sequences\[0\]"):
            engine.score([bad], [3])
    assert engine.pool.num_free == free


@pytest.mark.slow
def test_lora_whose_guard_fell_back_to_dense_rollouts(model: Path, tmp_path: Path) -> None:
    """The base stays in its format; the engine multiplies with its values, as the learner does."""
    tree = settings(
        model,
        tmp_path / "run",
        rollout={"weights": "nvfp4"},
        train={"max_steps": 2, "lora": True, "lora_rank": 4, "lr_scheduler_type": "constant"},
        guard={"action": "fallback", **ALWAYS, "patience": 1},
        force=True,
    )
    run = train(tree).folder
    found = diagnose(from_mapping(tree), run, num_prompts=4, n=2)
    assert found.format == "fp32" and found.whole.logp_diff_max < 1e-4


@pytest.mark.slow
def test_a_synchronous_run_is_never_stale(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoints are steps apart, and no rollout was ever drawn from the older one for the
    newer one."""
    tree = settings(
        model,
        tmp_path / "run",
        rollout={"weights": "fp32"},
        train={"max_steps": 3, "lr_scheduler_type": "constant", "warmup_steps": 0},
    )
    run = train(tree).folder
    capsys.readouterr()
    assert main(["diagnose", str(run), "--json", "--n", "4", "--k", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shares"]["staleness"] == 0 and found["reading"].startswith(
        "engine and learner agree"
    )
    assert found["notes"] == ["weights of step 3"]
    for format, causes in (("int8", ("weights", "rounding")), ("bf16", ("kernels",))):
        assert (
            main(["diagnose", str(run), "--json", "--n", "4", "--k", "2", "--format", format]) == 0
        )
        found = json.loads(capsys.readouterr().out)
        assert found["shares"]["staleness"] == 0, found["reading"]
        assert sum(found["shares"][cause] for cause in causes) > 0.5, found["reading"]
        assert found["whole"]["kl_k1"] == pytest.approx(
            sum(p["kl_k1"] for p in found["parts"]), abs=1e-9
        )

    cfg = from_mapping(tree)
    one = diagnose(cfg, run, prompts=["abc"], n=2)
    assert part(one, "staleness").remark and one.whole.logp_diff_max < 1e-4
    assert diagnose(cfg, run, prompts=["abc"], n=2) == one
    base = diagnose(cfg, prompts=["abc"], n=2)
    assert base.num_tokens != one.num_tokens or base.whole != one.whole


def test_the_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "diagnose",
                str(model),
                "--format",
                "int8",
                "--prompt",
                "abc",
                "--k",
                "2",
                "device=cpu",
                "--max-tokens",
                "6",
                "rollout.top_p=0.9",
                "rollout.cache_tokens=512",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    for words in (
        "int8 rollouts",
        "quantized -> dense",
        "aligned -> quantized",
        "decode -> prefill",
        "the cache forgot and rounded nothing",
        "same version",
        "decode -> dense",
        "note: drawn without the run's top_k",
        "of the gap comes from rounding: the engine rounds activations",
    ):
        assert words in out
    for words, told in (
        (["--n", "0"], "--n: must be at least 1"),
        (["--format", "int5"], "rollout.weights"),
        (["other"], "give one run folder or model"),
    ):
        assert main(["diagnose", str(model), *words]) == 2
        assert told in capsys.readouterr().err
