"""A run whose engine lies elsewhere, with one that stands for vLLM: which weights it is sent and
when, that it is closed whatever happens, and what is refused before anything is started. What a
real vLLM answers is asked in tests/parity/foreign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lowroll.checkpoint.store import Store
from lowroll.config import RunConfig, from_mapping
from lowroll.config.vllm import VllmConfig
from lowroll.metrics.record import read
from lowroll.model import hf, lora
from lowroll.model.linear import Linear
from lowroll.model.spec import read_spec
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor
from lowroll.runs.assembly import engines, models, vllm
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.diagnose import diagnose
from lowroll.runs.evaluate import evaluate
from lowroll.runs.preflight import Findings, look_at_run
from lowroll.transport.rollout_log import read_rollouts
from tests.fixtures.foreign import stand_in
from tests.fixtures.runs import copy_stopped_after, settings, train
from tests.fixtures.tiny import hf_folder

LORA = {"lora": True, "lora_rank": 2, "learning_rate": 1e-2}
STEPS = 3


def tree(model: Path, out: Path, engine: str = "vllm", **changes: Any) -> dict[str, Any]:
    rollout = {"engine": engine, "weights": "dense", "cache_tokens": None, "max_tokens": 6}
    train = {"max_steps": STEPS, "warmup_steps": 0, **changes.pop("train", {})}
    rest = {"correction": "tis", "ckpt": {"interval": 2}, "rollout": rollout, **changes}
    return settings(model, out, train=train, **rest)


def tokens(folder: Path, step: int) -> list[Any]:
    batch = read_rollouts(folder / "rollouts" / f"step_{step:06d}.jsonl")
    return [
        (s.rollout.token_ids, s.rollout.logprobs, s.rollout.behavior.policy) for s in batch.samples
    ]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("n", [2, 8])
def test_a_run_over_a_stream_is_the_run_in_one_process(
    n: int, lora: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stand_in(monkeypatch)
    changes: dict[str, Any] = {
        "rollouts_per_example": n,
        "batch_size": 16,
        "train": LORA if lora else {},
        "eval": {"interval": 2, "num_examples": 3},
    }
    far = train(tree(model, tmp_path / "far", **changes)).records
    native = tree(model, tmp_path / "near", "native", **changes)
    native["rollout"]["exact"] = False  # as the stand-in is
    near = train(native).records
    (engine,) = made
    assert engine.versions == [0, 1, 2, 3] and engine.closed == 1
    for step in range(1, STEPS + 1):
        assert tokens(tmp_path / "far", step) == tokens(tmp_path / "near", step)
        assert far[step - 1]["mismatch/logp_diff_max"] < 1e-4
    assert far[-1]["eval/reverse-text/reward"] == near[-1]["eval/reverse-text/reward"]
    assert any(name.startswith("weights/") for name in far[-1]) == lora
    held = [Store(tmp_path / side / "checkpoints").load() for side in ("far", "near")]
    assert held[0].meta["cache_tokens"] is None and held[1].meta["cache_tokens"] is not None


@pytest.mark.slow
def test_ppo_needs_one_rollout_a_prompt(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made, one) = stand_in(monkeypatch), {"rollouts_per_example": 1, "algorithm": "ppo"}
    records = train(tree(model, tmp_path / "run", **one)).records
    assert made[0].versions == [0, 1, 2, 3] and len(records) == STEPS


@pytest.mark.slow
def test_a_resumed_run_gives_the_engine_the_newest_weights_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stand_in(monkeypatch)
    kept = {"ckpt": {"interval": 1, "keep_last": None}}
    train(tree(model, tmp_path / "whole", **kept))
    copy_stopped_after(tmp_path / "whole", 2, tmp_path / "cut")
    section = {"engine": "vllm", "weights": "dense", "cache_tokens": None, "max_tokens": 6}
    moved = {
        "rollout": {**section, "vllm": {"folder": str(tmp_path / "weights")}},
        "client": {"timeout": 9.0},
    }
    train(tree(model, tmp_path / "cut", **kept, **moved), resume=True)
    assert made[1].versions == [0, 2, 3] and made[1].closed == 1
    assert tokens(tmp_path / "cut", 3) == tokens(tmp_path / "whole", 3)
    with pytest.raises(ValueError, match=r"rollout\.engine was 'vllm' and is 'native'"):
        train(tree(model, tmp_path / "cut", "native", **kept), resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("update", [0, 1])
def test_the_engine_is_closed_when_a_run_fails(
    update: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its first weights, and in mid-run."""
    made = stand_in(monkeypatch, fails=update)
    with pytest.raises(RuntimeError, match="the engine has ended"):
        train(tree(model, tmp_path / "run"))
    assert [engine.closed for engine in made] == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("able", "changes", "told"),
    [
        (
            {"context_length": 100},
            {},
            "train.tokens_per_microbatch: prompts and responses of up to",
        ),
        ({"updates": frozenset()}, {}, "train.lora: updates of kind 'full' are needed"),
        ({"updates": frozenset({"full"})}, {"train": LORA}, "kind 'adapter' are needed"),
        ({"exact_logprobs": False}, {}, "log-probs are not those of the distribution"),
        ({"sampler": frozenset({"temperature"})}, {}, "does not heed max_tokens"),
    ],
)
def test_what_this_vllm_cannot_do_is_refused_before_the_first_step(
    able: dict[str, Any],
    changes: dict[str, Any],
    told: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = stand_in(monkeypatch, **able)
    with pytest.raises(ValueError, match=told):
        train(tree(model, tmp_path / "run", **changes))
    assert made[0].closed == 1 and made[0].versions == [] and read(tmp_path / "run") == []


@pytest.mark.slow
def test_diagnose_asks_the_runs_engine_and_eval_lowrolls_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stand_in(monkeypatch)
    cfg = from_mapping(tree(model, tmp_path / "run", eval={"num_examples": 2}))
    found = diagnose(cfg, num_prompts=3, n=2)
    assert [(engine.versions, engine.closed) for engine in made] == [([0], 1)]
    assert found.num_tokens and found.whole.logp_diff_max < 1e-4
    rows = evaluate(cfg)
    assert [(row["weights"], row["kv"]) for row in rows] == [("fp32", "dense")] and len(made) == 1


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that says that it has vLLM, and does nothing else."""
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\n[ "$1" = -c ] || exit 9\n')
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_a_dry_run_starts_nothing(
    model: Path, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "make", lambda *_: pytest.fail("made"))

    def look(**section: Any) -> Findings:
        rollout = {"engine": "vllm", "weights": "dense", "vllm": section, "cache_tokens": None}
        return look_at_run(from_mapping(settings(model, tmp_path / "run", rollout=rollout)))

    for section in ({"python": str(python)}, {"url": "http://127.0.0.1:9"}):
        found = look(**section)
        assert found.problems == [] and not (tmp_path / "run").exists()
        (line,) = [line for line in found.lines if "vLLM" in line]
        assert line.startswith(f"rollouts by {VllmConfig(**section).words}, whose memory")
        assert "KV cache" not in "".join(found.lines)
    monkeypatch.setenv(vllm.PYTHON, str(python))
    assert look().problems == []
    for section, told in (
        ({"python": str(tmp_path / "none")}, "rollout.vllm.python: "),
        ({"python": "/bin/false"}, "rollout.vllm.python: /bin/false has no vLLM"),
        ({"folder": str(tmp_path / "none")}, "rollout.vllm.folder: "),
        ({"transfer": "nccl"}, "rollout.vllm.transfer: nccl moves weights between GPUs"),
        (
            {"url": "http://127.0.0.1:9", "token_env": "LOWROLL_NOT_SET"},
            "rollout.vllm.token_env: LOWROLL_NOT_SET is not set",
        ),
    ):
        (problem,) = look(**section).problems
        assert problem.startswith(told)
    monkeypatch.setenv(vllm.PYTHON, "/bin/false")
    (problem,) = look().problems
    assert problem.startswith("LOWROLL_VLLM_PYTHON: /bin/false has no vLLM")


def test_an_adapter_that_vllm_does_not_apply_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a dry run, and before a vLLM is made."""
    made = stand_in(monkeypatch)
    latent = hf_folder(tmp_path / "m", "deepseek-v3")
    spec = read_spec(latent)
    targets = list(lora.attention_targets(spec))

    def cfg(targets: list[str], engine: str = "vllm", adapts: bool = True) -> RunConfig:
        changed = {**LORA, "lora": adapts, "lora_target_modules": targets}
        return from_mapping(tree(latent, tmp_path / "run", engine, train=changed))

    told = "train.lora_target_modules: vLLM loads an adapter of kv_b_proj"
    assert any(problem.startswith(told) for problem in look_at_run(cfg(targets)).problems)
    compute = Compute.of(cfg(targets))
    shapes = Transformer(spec, "meta", compute.dtype)
    chat = models.chat_of(from_mapping(tree(model, tmp_path / "run")))
    with pytest.raises(ValueError, match=told):
        engines.make(cfg(targets), compute, shapes, chat)
    assert made == []
    engines.refuse(cfg(targets, engine="native"), spec)
    engines.refuse(cfg(targets, adapts=False), spec)
    engines.refuse(cfg([target for target in targets if target != "kv_b_proj"]), spec)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "nvfp4"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_server_is_started_on_what_the_rollouts_multiply_with(
    weights: str, lora: bool, model: Path, tmp_path: Path
) -> None:
    """The run's own folder, or one in the rollouts' format without the adapter."""
    cfg = from_mapping(
        {
            "model": str(model),
            "device": "cpu",
            "rollout": {"engine": "vllm", "weights": weights},
            "train": {"lora": lora, "lora_rank": 2},
        }
    )
    compute = Compute.of(cfg)
    learner = models.learner(cfg, compute)
    folder = vllm.base_folder(cfg, compute, lambda: learner, weights, tmp_path)
    assert (folder == model) == (weights == "fp32")
    held = hf.load(folder)
    assert held.weight_format == (None if weights == "fp32" else weights)
    for (_, theirs), (_, ours) in zip(held.linears(), learner.linears(), strict=True):
        assert theirs.adapter is None and (ours.adapter is not None) == lora
        if lora and weights != "fp32":
            assert torch.equal(dense_of(theirs), dense_of(ours))
    low_bit = from_mapping({**yaml.safe_load(cfg.dump()), "model": str(folder)})
    assert vllm.base_folder(low_bit, compute, lambda: learner, weights, tmp_path) == folder


def dense_of(linear: Linear) -> torch.Tensor:
    weight = linear.weight
    return weight.dequantize(torch.float32) if isinstance(weight, QTensor) else weight
