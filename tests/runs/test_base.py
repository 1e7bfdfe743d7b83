"""What an adapter stands on: stated in its folder, made again by default, exact when merged, and
priced elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from torch import Tensor

import lowroll
from lowroll.cli.main import main
from lowroll.model import adapter_base, hf, lora
from lowroll.model.adapter_base import base_of
from lowroll.model.headers import low_bit_format
from lowroll.quant.formats import get_format
from lowroll.runs import policy_gap
from lowroll.runs.assembly import engines
from lowroll.runs.export import export_run, quantize_folder
from lowroll.transport.rollout_log import read_rollouts
from lowroll.weights import aligned_forward, exploration_noise
from lowroll.weights.publish import digest, quantize_base
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.adapters import LORA, SEQUENCES
from tests.fixtures.runs import ALWAYS, run_session, settings, train
from tests.fixtures.sequences import logits
from tests.fixtures.tiny import hf_folder

FALLBACK = {"guard": {**ALWAYS, "action": "fallback"}}
EXACT, SCALED = 0.0, 1e-5  # s times A and divided by s again is A but for its last bit


def logp(model: Any) -> Tensor:
    return torch.cat(lowroll.score(model, SEQUENCES, [1] * len(SEQUENCES)))


# the format of the rollouts, the train section, more settings, how far apart the learner and final/
# may be
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    **{
        name: (name, {}, {}, EXACT)
        for name in ("int8", "nf4", "nvfp4", "int4", "w4a8", "mxfp4_floor", "dense")
    },
    "bf16 under a float32 learner": ("bf16", {}, {}, EXACT),
    "bf16 everywhere": ("nf4", {}, {"dtype": "bfloat16"}, EXACT),
    **{
        f"{name}, scaled": (name, {"uaq_scale": 1.5}, {}, SCALED)
        for name in ("int8", "nf4", "int4", "mxfp4", "dense")
    },
    "nvfp4, scaled, aligned": ("nvfp4", {"uaq_scale": 1.5, "forward": "aligned"}, {}, SCALED),
    "int8, aligned": ("int8", {"forward": "aligned"}, {}, EXACT),
    "int8, noise that the learner shares": (
        "int8",
        {},
        {"noise": {"learner": "shared", "sigma_start": 0.1}},
        EXACT,
    ),
    "int4, guard": ("int4", {}, FALLBACK, EXACT),
    "nf4, scaled, aligned, guard": (
        "nf4",
        {"uaq_scale": 1.5, "forward": "aligned"},
        FALLBACK,
        SCALED,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_final_is_the_policy_that_learned(case: str, model: Path, tmp_path: Path) -> None:
    """By default in `score`, in the engine, and merged; and the rollouts' format is what the engine
    chooses."""
    weights, changes, more, bound = RUNS[case]
    tree = settings(
        model, tmp_path / "run", rollout={"weights": weights}, train={**LORA, **changes}, **more
    )
    with ExitStack() as stack:
        session = run_session(tree, stack)
        session.finish(2)
        where, learner = session.compute, session.learner.model
        with aligned_forward.suspended(learner), exploration_noise.muted(learner):
            wanted = logp(learner)
        exact = session.rollouts.engine.model.exact
        fallen = session.rollouts.engine.behavior.weights != weights
        session.rollouts.engine.update_weights(WeightUpdate.local(learner, 3))  # without noise
        requests = [lowroll.Request([6, 7, 8 + i], n=2, max_tokens=8, seed=i) for i in range(2)]
        drawn = [
            rollout
            for group in session.rollouts.engine.generate(requests)
            for rollout in group.rollouts
        ]
    final = hf.load(tmp_path / "run" / "final", dtype=where.dtype)
    if learner.exact:
        final.be_exact()
    torch.testing.assert_close(logp(final), wanted, rtol=0, atol=bound)
    if not fallen and not get_format(weights if weights != "dense" else "fp32").dense:
        engine = lowroll.Engine(
            tmp_path / "run" / "final",
            device="cpu",
            dtype=where.dtype,
            cache_tokens=1024,
            exact=exact,
        )
        assert engine.behavior.weights == weights
        mine = [rollout for group in engine.generate(requests) for rollout in group.rollouts]
        assert [a.token_ids for a in mine] == [b.token_ids for b in drawn]
        for a, b in zip(mine, drawn, strict=True):
            torch.testing.assert_close(
                torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=2 * bound
            )
    export_run(tmp_path / "run", tmp_path / "merged", "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=where.dtype
    )
    with torch.no_grad():
        theirs = torch.cat(
            [
                merged(torch.tensor(ids)[None])
                .logits[0, :-1]
                .float()
                .log_softmax(-1)
                .gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
                for ids in SEQUENCES
            ]
        )
    torch.testing.assert_close(
        theirs, wanted, rtol=0, atol=1e-4 if where.dtype == torch.float32 else 0.1
    )


def finished(model: Path, out: Path, weights: str, **changes: Any) -> tuple[Path, Tensor]:
    """A run's folder, and its learner's log-probs at its end."""
    train_section = {**LORA, **changes.pop("train", {})}
    with ExitStack() as stack:
        session = run_session(
            settings(model, out, rollout={"weights": weights}, train=train_section, **changes),
            stack,
        )
        session.finish(2)
        return out, logp(session.learner.model)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_policy(model: Path, tmp_path: Path) -> None:
    tree = settings(
        model, tmp_path / "run", rollout={"weights": "nf4"}, train={**LORA, "uaq_scale": 1.5}
    )
    whole = logp(train(tree).folder / "final")
    for gone in ("final", "checkpoints/step_000002"):
        shutil.rmtree(tmp_path / "run" / gone)
    assert torch.equal(logp(train(tree, resume=True).folder / "final"), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "weights"), [("int8", "int8"), ("int8", "nf4"), ("int8", "fp32"), ("int4", "w4a8")]
)
def test_a_low_bit_model_as_the_base(
    folder: str, weights: str, model: Path, tmp_path: Path
) -> None:
    """In its own format, in another that is made from its dequantized values, in one that shares
    its codes."""
    quantize_folder(model, tmp_path / "low", folder)
    run, wanted = finished(tmp_path / "low", tmp_path / "run", weights)
    assert torch.equal(logp(run / "final"), wanted)
    card = (run / "final" / "README.md").read_text()
    assert ("Measured: " in card) == ("another policy" in card) == (weights == "nf4")


# -- what the folder says --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_folder_says_what_it_stands_on_and_peft_reads_it(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The statement, the card, and the price of the other base, counted again by PEFT in
    transformers."""
    run, wanted = finished(
        model, tmp_path / "run", "nf4", train={"uaq_scale": 1.5, "learning_rate": 0.05}
    )
    final = run / "final"
    assert json.loads((final / "adapter_base.json").read_text()) == {
        "weights": "nf4",
        "dtype": "float32",
        "uaq_scale": 1.5,
    }
    dense = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(dense, final).eval()
    samples = read_rollouts(run / "rollouts" / "step_000002.jsonl").samples
    learner = hf.load(final)
    difference = []
    for sample in samples:
        ids, start = sample.prompt_ids + sample.rollout.token_ids, len(sample.prompt_ids)
        with torch.no_grad():
            on_dense = theirs(torch.tensor(ids)[None]).logits[0, start - 1 : -1].log_softmax(-1)
        on_dense = on_dense.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
        difference.append(on_dense - lowroll.score(learner, [ids], [start])[0])
    gap = float(torch.cat(difference).abs().mean())
    assert gap > 1e-3
    assert main(["export", str(run), str(tmp_path / "adapter"), "--as", "adapter"]) == 0
    told = capsys.readouterr().out
    for text in (
        told,
        (final / "README.md").read_text(),
        (tmp_path / "adapter" / "README.md").read_text(),
    ):
        number, tokens = re.search(r": ([\d.e-]+) nats a token .* over (\d+) tokens", text).groups()
        assert float(number) == pytest.approx(gap, rel=0.02) and int(tokens) == len(
            torch.cat(difference)
        )
    assert "on the model as it is named, not on the base it states" in told
    for name in ("adapter_model.safetensors", "adapter_base.json", "adapter_config.json"):
        assert (tmp_path / "adapter" / name).read_bytes() == (final / name).read_bytes()


def test_a_model_of_the_hub_is_named_with_its_commit(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0a1b2c"
    shutil.copytree(model, snapshot)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(snapshot))
    tree = {
        **settings(model, tmp_path / "run", rollout={"weights": "int8"}, train=LORA),
        "model": "some/model",
    }
    final = train(tree).folder / "final"
    config = json.loads((final / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/model", "0a1b2c")
    assert "base_model: some/model\n" in (final / "README.md").read_text()
    assert logp(final).isfinite().all()


def test_a_card_is_one_of_the_hub(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    folder = hf_folder(tmp_path / "m")
    low = lora.attach(quantize_base(hf.load(folder), "int8"), 2, 4.0)
    cards = {}
    for name, model, named in (
        ("hub", low, "Qwen/Qwen3-0.6B"),
        ("local", low, str(folder)),
        ("nobody", low, ""),
        ("dense", lora.attach(hf.load(folder), 2, 4.0), str(folder)),
    ):
        lora.save(model, tmp_path / name, base=named)
        cards[name] = ModelCard.load(tmp_path / name / "README.md")
        front = yaml.safe_load((tmp_path / name / "README.md").read_text().split("---")[1])
        assert front["library_name"] == "peft"
        assert front.get("base_model") == ("Qwen/Qwen3-0.6B" if name == "hub" else None)
    for name in ("hub", "local", "nobody"):
        assert (
            "quantized to int8" in cards[name].text
            and "lowroll export FOLDER OUT --as merged" in cards[name].text
        )
        assert "not measured" in cards[name].text and "another policy" in cards[name].text
    assert "quantized" not in cards["dense"].text and f"`{folder}`" in cards["dense"].text
    assert cards["dense"].text.strip().endswith("linear weights as they are, float32.")


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no memory for a second model")


@pytest.mark.slow
def test_nothing_is_measured_without_tokens_or_room(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _ = finished(model, tmp_path / "run", "int8")
    first, second = (read_rollouts(run / "rollouts" / f"step_00000{step}.jsonl") for step in (1, 2))
    sizes = [len(sample.prompt_ids) + len(sample.rollout.token_ids) for sample in second.samples]
    order = sorted(
        range(len(sizes)), key=lambda i: second.samples[i].rollout.behavior.sample
    )  # a group in turn
    for most, kept in (
        (sum(sizes), order),
        (sizes[order[0]] + sizes[order[1]], order[:2]),
        (1, []),
    ):
        found = policy_gap.newest_batch(run, 9, most)
        assert (found.samples if found else []) == [second.samples[i] for i in kept]
    assert export_run(run, tmp_path / "there", "adapter", step=1).gap.tokens == sum(
        len(sample.rollout.token_ids) for sample in first.samples
    )
    with monkeypatch.context() as patch:
        patch.setattr(policy_gap, "free_memory", lambda device: 1 << 20)
        assert export_run(run, tmp_path / "small", "adapter").gap is None
    with monkeypatch.context() as patch:
        patch.setattr(lora, "load", out_of_memory)
        assert export_run(run, tmp_path / "full", "adapter").gap is None
    assert "was not measured here" in (tmp_path / "full" / "README.md").read_text()
    shutil.rmtree(run / "rollouts")
    assert policy_gap.newest_batch(run, 2) is None
    assert export_run(run, tmp_path / "away", "adapter").gap is None
    assert "was not measured here" in (tmp_path / "away" / "README.md").read_text()
    assert export_run(run, tmp_path / "merged", "merged").gap is None
    run, _ = finished(model, tmp_path / "dense", "dense")
    assert export_run(run, tmp_path / "same", "adapter").gap is None


BAD: dict[str, tuple[Any, str]] = {
    "text": ("{", "not JSON"),
    "list": ([], "an object with the keys weights, dtype, uaq_scale"),
    "more": (
        {"weights": "int8", "dtype": "float32", "uaq_scale": None, "awq": 1},
        "with the keys weights",
    ),
    "fewer": ({"weights": "int8", "dtype": "float32"}, "with the keys weights"),
    "format": (
        {"weights": "int3", "dtype": "float32", "uaq_scale": None},
        "weights: 'int3' is none of fp32, bf16",
    ),
    "format's kind": (
        {"weights": ["int8"], "dtype": "float32", "uaq_scale": None},
        r"weights: \['int8'\]",
    ),
    "dtype": (
        {"weights": None, "dtype": "int8", "uaq_scale": None},
        "dtype: 'int8' is none of float32, bfloat16",
    ),
    "no dtype": ({"weights": None, "dtype": None, "uaq_scale": None}, "dtype: None"),
    "zero": (
        {"weights": None, "dtype": "float32", "uaq_scale": 0},
        "uaq_scale: expected a positive number",
    ),
    "infinite": (
        {"weights": None, "dtype": "float32", "uaq_scale": float("inf")},
        "uaq_scale: .* got inf",
    ),
    "true": ({"weights": None, "dtype": "float32", "uaq_scale": True}, "uaq_scale: .* got True"),
    "words": ({"weights": None, "dtype": "float32", "uaq_scale": "1.5"}, "uaq_scale: .* got '1.5'"),
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random adapter on nf4."""
    folder = hf_folder(tmp_path_factory.mktemp("base") / "m", hidden_size=64, head_dim=16)
    model = lora.attach(quantize_base(hf.load(folder), "nf4"), 2, 4.0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.trainable_parameters().values():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return lora.save(model, folder.parent / "adapter", base=str(folder))


@pytest.mark.parametrize("case", BAD)
def test_a_bad_statement_is_refused_by_its_key(case: str, adapter: Path, tmp_path: Path) -> None:
    content, words = BAD[case]
    shutil.copytree(adapter, tmp_path / "a")
    (tmp_path / "a" / adapter_base.FILE).write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    for read in (hf.load, low_bit_format):
        with pytest.raises(ValueError, match=words) as caught:
            read(tmp_path / "a")
        assert str(caught.value).startswith(
            str(tmp_path / "a" / "adapter_base.json")
        ) and "\n" not in str(caught.value)


def test_any_positive_scale_is_read(adapter: Path, tmp_path: Path) -> None:
    for s in (0.4, 1, 3.0):
        (tmp_path / adapter_base.FILE).write_text(
            json.dumps({"weights": "nf4", "dtype": "bfloat16", "uaq_scale": s})
        )
        assert adapter_base.read(tmp_path) == adapter_base.Base("nf4", "bfloat16", s)


def test_without_a_statement_it_is_the_model_that_is_named(adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "a")
    (tmp_path / "a" / adapter_base.FILE).unlink()
    named = base_of(adapter)
    wanted = logits(lora.load(hf.load(named), adapter))
    assert low_bit_format(tmp_path / "a") is None and torch.equal(
        logits(hf.load(tmp_path / "a")), wanted
    )
    assert (logits(hf.load(adapter)) - wanted).abs().max() > 1e-3
    assert low_bit_format(adapter) == hf.load(adapter).weight_format == "nf4"


def test_layers_are_quantized_as_they_arrive(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense base is never in memory whole: neither where the adapter says the format, nor where
    its reader does."""
    plain = lora.attach(hf.load(base_of(adapter)), 2, 4.0)
    lora.save(plain, tmp_path / "plain", base=base_of(adapter))
    load, asked = hf.load, []

    def watched(source: Any, *args: Any) -> Any:
        asked.append((str(source), args[2]))
        return load(source, *args)

    monkeypatch.setattr(hf, "load", watched)
    for folder, weights in (
        (adapter, None),
        (adapter, "fp8"),
        (tmp_path / "plain", "fp8"),
        (tmp_path / "plain", None),
    ):
        load(folder, "cpu", torch.float32, weights)
    assert asked == [(base_of(adapter), early) for early in ("nf4", "nf4", "fp8", None)]


def test_a_model_that_is_low_bit_by_now_is_taken_as_it_is(adapter: Path, tmp_path: Path) -> None:
    """An adapter on the linear weights "as they are"."""
    quantize_folder(base_of(adapter), tmp_path / "low", "int8")
    lora.save(
        lora.attach(hf.load(base_of(adapter)), 2, 4.0),
        tmp_path / "a",
        base=str(tmp_path / "low"),
    )
    assert (
        adapter_base.read(tmp_path / "a").weights is None
        and low_bit_format(tmp_path / "a") == "int8"
    )
    assert hf.load(tmp_path / "a").weight_format == "int8"


@pytest.mark.parametrize("made_in", [torch.float32, torch.bfloat16])
def test_the_base_does_not_depend_on_the_readers_dtype(
    made_in: torch.dtype, tmp_path: Path
) -> None:
    """Codes are made of what the run read; activations, norms and embeddings are the reader's."""
    folder = hf_folder(tmp_path / "m", "qwen3-tied-bias")
    learner = lora.attach(quantize_base(hf.load(folder, dtype=made_in), "int8"), 2, 4.0)
    lora.save(learner, tmp_path / "a", base=str(folder))
    for dtype in (torch.float32, torch.bfloat16):
        model = hf.load(tmp_path / "a", dtype=dtype)
        assert model.dtype == model.norm.weight.dtype == dtype and model.lm_head is None
        for (_, a), (_, b) in zip(model.linears(), learner.linears(), strict=True):
            assert all(
                torch.equal(t, b.weight.tensors[name]) for name, t in a.weight.tensors.items()
            )
            assert (
                a.adapter.a["q_proj" if "q_proj" in a.parts else next(iter(a.parts))].dtype
                == torch.float32
            )
        if dtype == made_in:
            assert digest(model) == digest(learner)
    assert hf.load(tmp_path / "a").dtype == torch.float32  # the CPU's default


# -- an adapter folder, exported -------------------------------------------------------------------


@pytest.mark.slow
def test_an_adapter_folder_is_exported_with_its_base(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = hf.load(adapter)
    assert main(["export", str(adapter), str(tmp_path / "merged"), "--as", "merged"]) == 0
    assert "merged of an adapter, linear weights fp32" in capsys.readouterr().out
    merged = hf.load(tmp_path / "merged")
    assert merged.weight_format is None
    torch.testing.assert_close(logits(merged), logits(wanted), rtol=0, atol=1e-4)
    assert main(["export", str(adapter), str(tmp_path / "rollout"), "--as", "rollout"]) == 0
    assert hf.load(tmp_path / "rollout" / "base").weight_format == "nf4"
    assert digest(hf.load(tmp_path / "rollout")) == digest(wanted)
    assert "in the folder `base`" in (tmp_path / "rollout" / "README.md").read_text()
    assert main(["export", str(adapter), str(tmp_path / "no"), "--as", "adapter"]) == 2
    assert (
        main(["export", str(adapter), str(tmp_path / "no"), "--as", "merged", "--step", "1"]) == 2
    )
    assert capsys.readouterr().err.count("is an adapter folder: it has no checkpoints") == 2
    assert not (tmp_path / "no").exists()


def test_a_bfloat16_merge_rounds_each_sum_once(tmp_path: Path) -> None:
    """An update smaller than the spacing of bfloat16 is worth half of it on average, and is not
    rounded before."""
    model = lora.attach(hf.load(hf_folder(tmp_path / "m"), dtype=torch.bfloat16), 2, 4.0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.trainable_parameters().values():
            p.copy_(0.03 * torch.randn(p.shape, generator=generator))
    down = model.blocks[0].down
    exact = down.weight.float() + 2 * down.adapter.b["down_proj"] @ down.adapter.a["down_proj"]
    assert torch.equal(lora.merge(model).blocks[0].down.weight, exact.bfloat16())


@pytest.mark.slow
def test_evaluation_takes_the_format_that_the_model_stands_on(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _ = finished(model, tmp_path / "run", "nf4")
    asked: list[str] = []
    engine = engines.make

    def watched(*args: Any) -> lowroll.Engine:
        made = engine(*args)
        asked.append(made.behavior.weights)
        return made

    monkeypatch.setattr(engines, "make", watched)
    few = ["--n", "1", "--k", "1", "--max-tokens", "2"]
    for words in (
        ["--model", str(run / "final"), "--env", "reverse-text"],
        [str(run / "config.yaml"), "--model", str(run / "final")],
        ["--model", str(run / "final"), "--env", "reverse-text", "rollout.weights=int4"],
        ["--model", str(model), "--env", "reverse-text"],
        ["--model", str(run / "final"), "--env", "reverse-text", "--weights", "fp8"],
    ):
        assert main(["eval", *words, *few]) == 0
    assert asked == ["fp32", "nf4", "fp32", "nf4", "fp32", "int4", "fp32", "int8", "fp8"]
