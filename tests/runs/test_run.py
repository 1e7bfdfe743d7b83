"""Whole runs: exact resume after every step, GSM8K through every stage, LoRA, dynamic sampling,
refusals, signals."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lowroll
from lowroll.checkpoint.store import Store
from lowroll.cli.main import main
from lowroll.config import from_mapping, load
from lowroll.engine import cache_size as engine_module
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.kv.cache import KVCache
from lowroll.metrics.live import LiveView
from lowroll.metrics.record import read
from lowroll.model import hf, initialize, lora
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.orchestrator.loop import Orchestrator
from lowroll.runs import demo
from lowroll.runs.assembly import environments
from lowroll.runs.diagnose import diagnose
from lowroll.runs.evaluate import evaluate
from lowroll.runs.monitor import Monitor
from lowroll.transport.rollout_log import read_rollouts
from lowroll.types import Batch, Score
from lowroll.weights.publish import dequantize_base
from tests.fixtures.roles import forked, write
from tests.fixtures.runs import copy_stopped_after, fingerprint, settings, train

DATA = Path(os.environ.get("LOWROLL_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.slow
def test_resume_after_every_step_is_bitwise_the_uninterrupted_run(
    model: Path, tmp_path: Path
) -> None:
    tree = settings(
        model,
        tmp_path / "whole",
        loss={"kl_coef": 0.01},
        eval={"interval": 3, "num_examples": 4},
        train={"max_steps": 6},
    )
    result = train(tree)
    whole = fingerprint(result.folder)
    assert len(result.records) == 6 < len(whole)
    assert fingerprint(train({**tree, "output_dir": str(tmp_path / "again")}).folder) == whole
    for step in range(1, 6):
        copy_stopped_after(result.folder, step, tmp_path / f"cut{step}")
        resumed = train({**tree, "output_dir": str(tmp_path / f"cut{step}")}, resume=True)
        assert fingerprint(resumed.folder) == whole, f"resumed after step {step}"
        shutil.rmtree(tmp_path / f"cut{step}")


def test_a_run_of_single_samples_with_shared_prefixes_has_no_mismatch(
    model: Path, tmp_path: Path
) -> None:
    """PPO takes one response a prompt: prompts that end in one step, some of them behind pages of
    the prefix cache."""
    envs = [
        {
            "id": "reverse-text",
            "name": name,
            "args": {"template": template, "min_len": 3, "max_len": 5},
        }
        for name, template in (("long", "write it backwards: {text}"), ("short", "{text}"))
    ]
    result = train(
        settings(
            model,
            tmp_path / "run",
            env=envs,
            algorithm="ppo",
            rollouts_per_example=1,
            batch_size=16,
            rollout={"weights": "fp32", "max_batch": 6},
            correction="none",
            dtype="float32",
            train={"max_steps": 3, "minibatches": 2, "lr_scheduler_type": "constant"},
        )
    )
    assert result.records[-1]["perf/prefix_hits"] > 10
    assert all(record["mismatch/kl_k3"] < 1e-10 for record in result.records)


@pytest.mark.slow
def test_resume_is_bitwise_when_evaluation_and_rollouts_share_a_prefix(tmp_path: Path) -> None:
    """A resumed run has no pages of the evaluation's prompts, and a prompt behind such pages rounds
    otherwise."""
    model = demo.build_model(tmp_path / "model", 0, demo.CONFIG)
    env = {
        "id": "reverse-text",
        "args": {
            "template": "write this word backwards, please, from its end: {text}",
            "min_len": 3,
            "max_len": 3,
            "max_words": 1,
        },
    }
    tree = settings(
        model,
        tmp_path / "whole",
        env=[env],
        train={"max_steps": 3},
        rollout={"weights": "fp32"},
        eval={"interval": 1, "num_examples": 4},
        dtype="float32",
    )
    result = train(tree)
    copy_stopped_after(result.folder, 2, tmp_path / "cut")
    resumed = train({**tree, "output_dir": str(tmp_path / "cut")}, resume=True)
    assert fingerprint(resumed.folder) == fingerprint(result.folder)


@pytest.mark.slow
def test_resume_falls_back_from_a_damaged_checkpoint(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = settings(model, tmp_path / "run", train={"max_steps": 4})
    whole = fingerprint(train(tree).folder)
    weights = tmp_path / "run" / "checkpoints" / "step_000004" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert fingerprint(train(tree, resume=True).folder) == whole
    assert (
        "DAMAGED CHECKPOINT" in caplog.text
        and (tmp_path / "run" / "checkpoints" / "damaged").is_dir()
    )


def die(tree: dict[str, Any], at: str, home: Path) -> None:
    """Run in a process of its own that kills itself at a fault point."""
    file, log = write(tree, home / "run.yaml"), home / "killed.log"
    with forked(log, "grpo", str(file), LOWROLL_FAULT=f"{at}:kill") as child:
        assert child.wait(timeout=120) == -signal.SIGKILL, log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "interval, at",
    [
        (1, "store.verified"),
        (1, "store.tensors_written/model"),
        (50, "store.tensors_written/model"),
    ],
)
def test_a_killed_run_goes_on_without_a_gap(
    model: Path, tmp_path: Path, interval: int, at: str
) -> None:
    """Killed behind its first checkpoint, in it, and in the last step of a run that made none
    before."""
    tree = settings(model, tmp_path / "whole", train={"max_steps": 3}, ckpt={"interval": interval})
    whole = fingerprint(train(tree).folder)
    tree["output_dir"] = str(tmp_path / "killed")
    die(tree, at, tmp_path)
    with pytest.raises(ValueError, match="already holds a run"):
        train(tree)
    with pytest.raises(ValueError, match=r"seed was 3 and is 4"):
        train({**tree, "seed": 4}, resume=True)
    result = train(tree, resume=True)
    assert [record["step"] for record in result.records] == [1, 2, 3] and fingerprint(
        result.folder
    ) == whole


def test_the_temperature_goes_from_its_start_to_its_end(model: Path, tmp_path: Path) -> None:
    schedule = {"type": "linear", "start_temperature": 1.2, "end_temperature": 0.6}
    tree = settings(
        model, tmp_path / "run", train={"max_steps": 3}, rollout={"temp_scheduler": schedule}
    )
    assert [r["rollout/temperature"] for r in train(tree).records] == pytest.approx([1.2, 0.9, 0.6])


def test_evaluation_may_score_otherwise_than_training_under_the_same_name(
    model: Path, tmp_path: Path
) -> None:
    def arithmetic(weight: float) -> list[dict[str, Any]]:
        args = {"format_weight": weight, "template": "{text}", "min_steps": 1, "max_steps": 1}
        return [{"id": "arithmetic", "args": args}]

    tree = settings(
        model,
        tmp_path / "run",
        train={"max_steps": 1, "warmup_steps": 0},
        env=arithmetic(0.0),
        eval={"interval": 1, "num_examples": 2, "env": arithmetic(0.5)},
    )
    session_specs: list[Any] = []
    original = environments.ScorerPool

    def watched(specs: Any, *args: Any) -> Any:
        session_specs.append({name: spec[1]["format_weight"] for name, spec in specs.items()})
        return original(specs, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environments, "ScorerPool", watched)
        train(tree)
    assert session_specs == [{"arithmetic": 0.0}, {"arithmetic": 0.5}]


@pytest.mark.slow
def test_evaluation_has_a_sampler_of_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run and in `lowroll eval`: nothing of the rollouts' sampler reaches it."""
    asked: list[dict[str, Any]] = []
    generate = lowroll.Engine.generate
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "stop_strings",
        "max_tokens",
    )

    def watched(engine: lowroll.Engine, requests: list[lowroll.Request], **options: Any) -> Any:
        asked.extend(
            {name: getattr(request, name) for name in names}
            for request in requests
            if request.id.startswith("test/")
        )
        return generate(engine, requests, **options)

    def added(engine: lowroll.Engine, request: lowroll.Request) -> int:
        asked.append({name: getattr(request, name) for name in names})
        return add(engine, request)

    add = lowroll.Engine.add
    monkeypatch.setattr(lowroll.Engine, "generate", watched)
    monkeypatch.setattr(lowroll.Engine, "add", added)
    rollout = {
        "temperature": 0.8,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "stop": ["a"],
    }
    plain = dict(zip(names, (0.0, 1.0, 0, 0.0, 1.0, 0, ("a",), 6), strict=True))
    for own in (
        {},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 9, "min_p": 0.05, "repetition_penalty": 1.1},
    ):
        tree = settings(
            model,
            tmp_path / f"run{len(own)}",
            rollout=rollout,
            train={"max_steps": 1, "warmup_steps": 0},
            eval={"interval": 1, "num_examples": 2, **own},
        )
        train(tree)
        in_a_run = list(asked)
        evaluate(from_mapping(tree), ["fp32"])
        drawn = plain | {name: value for name, value in rollout.items() if name in names}
        assert asked[-2:] == [plain | own] * 2 and in_a_run == asked[:-2]
        # before the first step and after the last, greedily (or as asked) and as the rollouts are
        # drawn
        assert in_a_run == ([plain | own] * 2 + [drawn] * 2) * 2
        asked.clear()


@pytest.mark.slow
def test_a_run_is_measured_before_its_first_step_and_after_its_last(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedily and as the rollouts are drawn; and the live view is told of every phase while it
    lasts."""
    told: list[str] = []
    monkeypatch.setattr(
        LiveView, "phase", lambda self, name, done, total: told.append(f"{name} {done}/{total}")
    )
    env = {
        "id": "reverse-text",
        "name": "a/b",
        "args": {"template": "{text}", "max_words": 1, "max_len": 5},
    }
    tree = settings(
        model,
        tmp_path / "run",
        env=[env],
        train={"max_steps": 3},
        eval={"interval": 2, "num_examples": 4},
    )
    first, second, third = train(tree).records
    here, there = ("reward", "pass_at_1"), ("sampled_reward", "sampled_pass_at_1")
    names = {f"eval/a/b/{name}" for name in here + there}
    assert {name for name in first if name.startswith("eval/a/b")} == {
        f"{name}_before" for name in names
    }
    assert {name for name in names if name in second} == {f"eval/a/b/{name}" for name in here}
    assert names <= set(third) and {r["eval/temperature"] for r in (first, second, third)} == {0.0}
    assert all(record["time/eval"] > 0 for record in (first, second, third))

    story = (tmp_path / "run" / "logs" / "attempt_1.log").read_text()
    assert (
        story.count(
            "evaluating the policy before step 1 (eval.interval: null leaves evaluations out)"
        )
        == 1
    )

    again = evaluate(from_mapping(tree), ["int8"])[0]  # the model that the run began with
    assert again["reward"] == first["eval/a/b/reward_before"]
    drawn = from_mapping(
        {
            **tree,
            "model": str(tmp_path / "run" / "final"),
            "eval": {**tree["eval"], "temperature": 1.0},
        }
    )
    assert evaluate(drawn, ["int8"])[0]["reward"] == third["eval/a/b/sampled_reward"]

    order = [name for name, _ in itertools.groupby(line.rsplit(" ", 1)[0] for line in told)]
    step = ["generate", "score", "learn", "publish"]
    held_out = ["evaluate: generate", "evaluate: score"]
    assert order == [*held_out * 2, *step, *step, *held_out, *step, *held_out * 2]
    assert [line for line in told if line.startswith("learn")][:3] == [
        "learn 0/2",
        "learn 1/2",
        "learn 2/2",
    ]


@pytest.mark.slow
def test_a_run_can_be_lengthened_when_nothing_is_scheduled_over_its_length(
    model: Path, tmp_path: Path
) -> None:
    constant = {"lr_scheduler_type": "constant"}
    whole = train(settings(model, tmp_path / "whole", train={**constant, "max_steps": 4}))
    train(settings(model, tmp_path / "run", train={**constant, "max_steps": 2}))
    longer = train(
        settings(model, tmp_path / "run", train={**constant, "max_steps": 4}), resume=True
    )
    assert fingerprint(longer.folder) == fingerprint(whole.folder)
    train(settings(model, tmp_path / "cosine", train={"max_steps": 2}))
    with pytest.raises(ValueError, match=r"train\.max_steps was 2 and is 4"):
        train(settings(model, tmp_path / "cosine", train={"max_steps": 4}), resume=True)


def test_a_run_learns_and_says_what_it_did(model: Path, tmp_path: Path) -> None:
    result = train(settings(model, tmp_path / "run", train={"max_steps": 3}))
    record = result.records[-1]
    for name in (
        "reward/mean",
        "mismatch/kl_k3",
        "mismatch/ess",
        "policy/entropy",
        "policy/clip_fraction_high",
        "correction/truncated_fraction",
        "rollout/length_mean",
        "optim/grad_norm",
        "time/generate",
        "time/score",
        "time/learn",
        "time/publish",
        "time/step",
        "perf/generate_tokens_per_second",
    ):
        assert record[name] is not None, name
    assert 0 < record["mismatch/kl_k3"] < 0.05
    batch = read_rollouts(tmp_path / "run" / "rollouts" / "step_000003.jsonl")
    assert {s.rollout.behavior.policy[0].version for s in batch.samples} == {2}
    assert {s.rollout.behavior.weights for s in batch.samples} == {"int8"}
    before, after = hf.load(model), hf.load(result.folder / "final")
    assert not torch.equal(before.embedding, after.embedding)
    lowroll.Engine(result.folder / "final").tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}]
    )
    log = tmp_path / "run" / "logs" / "attempt_1.log"
    assert log.is_file()


def test_rollouts_replay_from_their_tags(model: Path, tmp_path: Path) -> None:
    """Seed, request id and policy version of a logged rollout give its tokens again."""
    train(settings(model, tmp_path / "run", train={"max_steps": 2}))
    batch = read_rollouts(tmp_path / "run" / "rollouts" / "step_000001.jsonl")
    engine = lowroll.Engine(model, weights="int8", device="cpu")
    for sample in batch.samples:
        tag = sample.rollout.behavior
        request = lowroll.Request(
            sample.prompt_ids, n=tag.sample + 1, max_tokens=6, seed=tag.seed, id=tag.request_id
        )
        again = engine.generate([request])[0].rollouts[tag.sample]
        assert again.token_ids == sample.rollout.token_ids
        torch.testing.assert_close(
            torch.tensor(again.logprobs), torch.tensor(sample.rollout.logprobs), rtol=0, atol=1e-4
        )
        assert tag.policy[0].digest == engine.behavior.policy[0].digest


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "dense"])
def test_lora_shares_one_base_and_publishes_an_adapter(
    model: Path, tmp_path: Path, weights: str
) -> None:
    tree = settings(
        model,
        tmp_path / "run",
        rollout={"weights": weights},
        train={"max_steps": 3, "lora": True, "lora_rank": 4},
        loss={"kl_coef": 0.05},
    )
    result = train(tree)
    adapter = load_file(result.folder / "final" / "adapter_model.safetensors")
    assert any(t.abs().max() > 0 for name, t in adapter.items() if "lora_B" in name)
    assert result.records[-1]["policy/kl_reference"] >= 0
    merged = lora.merge(dequantize_base(hf.load(result.folder / "final")))
    torch.testing.assert_close(
        lowroll.score(result.folder / "final", [[6, 7, 8]], [1])[0],  # an adapter folder
        lowroll.score(merged, [[6, 7, 8]], [1])[0],
        rtol=0,
        atol=1e-5,
    )
    with pytest.raises(ValueError, match="adapter folder"):
        train(
            {**tree, "model": str(result.folder / "final"), "output_dir": str(tmp_path / "other")}
        )
    engine = lowroll.Engine(result.folder / "final", weights="int8", device="cpu")
    assert engine.generate([lowroll.Request(engine.tokenizer.encode("abc"), max_tokens=3)])[
        0
    ].rollouts
    whole = {name: t.clone() for name, t in adapter.items()}
    for path in (result.folder / "checkpoints" / "step_000003", result.folder / "final"):
        shutil.rmtree(path)
    train(tree, resume=True)
    resumed = load_file(result.folder / "final" / "adapter_model.safetensors")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm,correction",
    [
        ("dapo", "acr"),
        ("gspo", "tis"),
        ("dr_grpo", "decoupled"),
        ("rloo", "tis"),
        ("grpo_no_std", "is"),
        ("grpo", "none"),
    ],
)
def test_every_algorithm_runs(model: Path, tmp_path: Path, algorithm: str, correction: str) -> None:
    result = train(
        settings(
            model,
            tmp_path / "run",
            algorithm=algorithm,
            correction=correction,
            force=True,
            train={"max_steps": 2},
            dapo={"overlong_max": 6, "overlong_cache": 2},
        )
    )
    assert all(r["policy/objective"] is not None and not r["optim/skipped"] for r in result.records)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "correction", "loss"),
    [
        ("grpo", "tbpo", {}),
        ("dapo", "tbpo", {"tbpo": {"eps_negative": 1e-3}}),
        ("grpo", "sparse", {"kl_coef": 1e-3}),
        (
            "grpo",
            "sparse",
            {"sparse": {"xi_cap": 1.5, "token_rs": [0.5, 1.5], "normalize_xi": True}},
        ),
        (
            "grpo_no_std",
            "aipo",
            {"reduce": "token-mean", "aipo": {"kl_tau": 0.01, "mode": "truncate"}},
        ),
        ("grpo", "aipo", {"aipo": {"ratio_type": "sequence"}}),
        ("dapo", "ipo", {"ipo": {"signed": True, "width": 0.1}}),
        (
            "dapo",
            "reweight",
            {
                "reweight": {
                    "weight": "sequence",
                    "normalize": True,
                    "veto": 1e-4,
                    "reject": {"token_k1": [0.5, 2.0], "seq_mean_k3": 0.1},
                }
            },
        ),
        ("grpo", "reweight", {"reweight": {"bypass": True}}),
    ],
)
def test_every_correction_runs_and_resumes(
    model: Path, tmp_path: Path, algorithm: str, correction: str, loss: dict[str, Any]
) -> None:
    tree = settings(
        model,
        tmp_path / "run",
        algorithm=algorithm,
        correction=correction,
        loss=loss,
        train={"max_steps": 2},
    )
    result = train(tree)
    for record in result.records:
        assert (
            record["policy/objective"] is not None
            and not record["optim/skipped"]
            and record["optim/grad_norm"] > 0
        )
        assert (
            "policy/band_masked_fraction"
            if correction == "tbpo"
            else "correction/rejected_fraction"
        ) in record
    whole = fingerprint(result.folder)
    copy_stopped_after(result.folder, 1, tmp_path / "cut")
    assert (
        fingerprint(train({**tree, "output_dir": str(tmp_path / "cut")}, resume=True).folder)
        == whole
    )


@pytest.mark.slow
def test_a_run_with_a_teacher_resumes_and_refuses_another_vocabulary(
    model: Path, tmp_path: Path
) -> None:
    teacher = hf.load(model)
    with torch.no_grad():
        for _, linear in teacher.linears():
            linear.weight.mul_(3)
    hf.save(teacher, tmp_path / "teacher", tokenizer_from=model)
    tree = settings(
        model,
        tmp_path / "run",
        correction="aipo",
        loss={"aipo": {"teacher_tau": 0.5}},
        train={"max_steps": 2, "teacher": str(tmp_path / "teacher")},
    )
    result = train(tree)
    assert all(
        record["optim/grad_norm"] > 0 and not record["optim/skipped"] for record in result.records
    )
    whole = fingerprint(result.folder)
    copy_stopped_after(result.folder, 1, tmp_path / "cut")
    assert (
        fingerprint(train({**tree, "output_dir": str(tmp_path / "cut")}, resume=True).folder)
        == whole
    )
    alone = train(
        {
            **tree,
            "output_dir": str(tmp_path / "alone"),
            "loss": {},
            "train": {**tree["train"], "teacher": None},
        }
    )
    assert fingerprint(alone.folder)["final"] != whole["final"]

    other = json.loads((tmp_path / "teacher" / "tokenizer.json").read_text())
    token = next(iter(other["model"]["vocab"]))
    other["model"]["vocab"]["another"] = other["model"]["vocab"].pop(token)
    (tmp_path / "teacher" / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"train\.teacher: the vocabulary of .* is not that of"):
        train({**tree, "output_dir": str(tmp_path / "other")})


def test_refusals_leave_the_folder_alone(model: Path, tmp_path: Path) -> None:
    tree = settings(model, tmp_path / "run", train={"max_steps": 1, "warmup_steps": 0})
    with pytest.raises(ValueError, match="no run to resume"):
        train(tree, resume=True)
    train(tree)
    before = fingerprint(tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a run"):
        train(tree)
    with pytest.raises(ValueError, match=r"train\.learning_rate was 0\.01 and is 0\.02"):
        train({**tree, "train": {**tree["train"], "learning_rate": 0.02}}, resume=True)
    assert fingerprint(tmp_path / "run") == before
    with pytest.raises(ValueError, match="leaves no room for a prompt"):
        train(
            settings(
                model,
                tmp_path / "other",
                rollout={"max_tokens": 256},
                train={"tokens_per_microbatch": 999},
            )
        )


@pytest.mark.slow
def test_sigterm_finishes_the_step_and_the_run_can_go_on(model: Path, tmp_path: Path) -> None:
    tree = settings(
        model,
        tmp_path / "run",
        train={"max_steps": 2000, "lr_scheduler_type": "constant"},
        ckpt={"interval": 1000},
    )
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    process = subprocess.Popen(
        [sys.executable, "-m", "lowroll.cli.main", "grpo", str(tmp_path / "run.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 143 and "finishing this step" in output
    steps = len(read(tmp_path / "run"))
    assert Store(tmp_path / "run" / "checkpoints").load().step == steps


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Half of the answers are right, and from step `solved["at"]` on all of them."""
    now, step = {"at": 3}, Orchestrator.step

    def stepped(self: Orchestrator, number: int, version: int | None = None) -> Batch:
        now["step"] = number
        return step(self, number, version)

    def scored(self: ScorerPool, items: Any, **more: Any) -> Any:
        return [Score(float(i % 2 or now["step"] >= now["at"])) for i in range(len(items))]

    monkeypatch.setattr(Orchestrator, "step", stepped)
    monkeypatch.setattr(ScorerPool, "score", scored)
    return now


@pytest.mark.slow
def test_a_run_that_ends_where_a_stage_begins_can_go_on(
    model: Path, tmp_path: Path, solved: dict[str, int]
) -> None:
    """Its checkpoint is of the step before, in the stage before."""
    tree = settings(
        model,
        tmp_path / "run",
        train={"max_steps": 4},
        ckpt={"interval": 50},
        stages=[{"step": 3, "rollouts_per_example": 8, "batch_size": 16, "max_tokens": 8}],
        dapo={"dynamic_sampling": True, "max_rounds": 2},
    )
    assert "constant rewards" in train(tree).ended
    more = train({**tree, "dapo": {**tree["dapo"], "no_signal": "go_on"}}, resume=True)
    assert [record["rollout/num_samples"] for record in more.records] == [8, 8, 16, 16]
    assert (
        "no_signal: go_on" in (tmp_path / "run" / "config.yaml").read_text()
    )  # export, diagnose read it


def test_a_run_without_room_for_its_longest_stage_is_refused_at_the_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = settings(
        model,
        tmp_path / "run",
        dtype="float32",
        rollout={"cache_tokens": None},
        stages=[{"step": 3, "max_tokens": 60}],
    )
    monkeypatch.setattr("lowroll.runs.memory.plan.free_memory", lambda device: 10**6)
    with pytest.raises(ValueError, match="^memory: the run needs .* than the 1 MB that are free"):
        train(tree)


@pytest.mark.slow
@pytest.mark.parametrize(("at", "interval"), [(1, 50), (3, 1)])
def test_a_run_that_has_solved_its_tasks_ends_politely_and_can_go_on(
    model: Path,
    tmp_path: Path,
    solved: dict[str, int],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    at: int,
    interval: int,
) -> None:
    solved["at"] = at
    tree = settings(
        model,
        tmp_path / "run",
        train={"max_steps": 5},
        ckpt={"interval": interval},
        dapo={"dynamic_sampling": True, "max_rounds": 6},
    )
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    assert main(["grpo", str(tmp_path / "run.yaml")]) == 0
    assert (
        f"the run ends after step {at - 1} of 5: dynamic sampling: all 12 groups of 6 rounds"
        in caplog.text
    )
    assert "trained weights:" in capsys.readouterr().out
    assert (
        len(read(tmp_path / "run")) == at - 1 == Store(tmp_path / "run" / "checkpoints").load().step
    )
    weights = (tmp_path / "run" / "final" / "model.safetensors").read_bytes()
    again = train(tree, resume=True)  # asks the same, and ends the same
    assert "constant rewards (1 in the mean)" in again.ended and len(again.records) == at - 1
    assert (tmp_path / "run" / "final" / "model.safetensors").read_bytes() == weights
    with pytest.raises(ValueError, match="seed was 3 and is 4"):
        train({**tree, "seed": 4}, resume=True)
    if at == 1:
        return
    for name, change in (
        ("go_on", {"no_signal": "go_on"}),
        ("without", {"dynamic_sampling": False}),
        ("rounds", {"max_rounds": 7}),
    ):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        more = train(
            {**tree, "output_dir": str(tmp_path / name), "dapo": {**tree["dapo"], **change}},
            resume=True,
        )
        assert len(more.records) == (at - 1 if name == "rounds" else 5) and bool(more.ended) == (
            name == "rounds"
        )
    records = {
        name: [record["reward/mean"] for record in read(tmp_path / name)]
        for name in ("go_on", "without")
    }
    assert records["go_on"][at - 1 :] == records["without"][at - 1 :] == [1.0] * (6 - at)


@pytest.mark.slow
def test_how_a_run_looks_for_signal_may_not_change_while_it_finds_some(
    model: Path, tmp_path: Path, solved: dict[str, int]
) -> None:
    tree = settings(
        model, tmp_path / "run", train={"max_steps": 2}, dapo={"dynamic_sampling": True}
    )
    train(tree)
    copy_stopped_after(tmp_path / "run", 1, tmp_path / "cut")
    for name, value in (("max_rounds", 9), ("dynamic_sampling", False)):
        with pytest.raises(ValueError, match=rf"dapo\.{name} was"):
            train(
                {
                    **tree,
                    "output_dir": str(tmp_path / "cut"),
                    "dapo": {**tree["dapo"], name: value},
                },
                resume=True,
            )
    shutil.copytree(
        tmp_path / "run" / "final", tmp_path / "cut" / "final"
    )  # of step 2, and the run is at step 1
    with pytest.raises(ValueError, match=r"dapo\.max_rounds was"):
        train(
            {
                **tree,
                "output_dir": str(tmp_path / "cut"),
                "dapo": {**tree["dapo"], "max_rounds": 9},
            },
            resume=True,
        )
    tree = {
        **tree,
        "output_dir": str(tmp_path / "cut"),
        "dapo": {**tree["dapo"], "no_signal": "go_on"},
    }
    assert len(train(tree, resume=True).records) == 2


@pytest.mark.slow
def test_a_fallback_with_little_memory_takes_a_smaller_cache_and_is_resumed_with_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format that the guard falls back to needs more memory than the one that the cache was
    chosen beside."""
    each = KVCache.bytes_per_token(hf.load(model).spec, torch.float32)
    free = {"bytes": 1 << 30}
    monkeypatch.setattr(engine_module, "free_memory", lambda device: free["bytes"])
    tree = settings(
        model,
        tmp_path / "run",
        train={"max_steps": 4},
        dtype="float32",
        rollout={"cache_tokens": 2048},
        guard={"action": "fallback", "ratio_above": 1.0001, "patience": 2},
    )
    looked = Monitor.look

    def tight(monitor: Monitor, step: int, metrics: dict[str, float]) -> dict[str, float]:
        free["bytes"] = 4 * 240 * each
        return looked(monitor, step, metrics)

    monkeypatch.setattr(Monitor, "look", tight)
    whole = train(tree)
    assert [r["rollout/weight_bits"] for r in whole.records] == [8, 8, 32, 32]
    store = Store(whole.folder / "checkpoints")
    assert [store.load(step).meta["cache_tokens"] for step in (1, 2, 4)] == [2048, 240, 240]
    copy_stopped_after(whole.folder, 3, tmp_path / "cut")
    free["bytes"] = 1 << 30
    resumed = train({**tree, "output_dir": str(tmp_path / "cut")}, resume=True)
    assert fingerprint(resumed.folder) == fingerprint(whole.folder)
    free["bytes"] = 1 << 30
    for asked, format in (({}, "fp32"), ({"rollout.weights": "int4"}, "int4")):
        assert (
            diagnose(
                load(whole.folder / "config.yaml", asked), whole.folder, num_prompts=2, n=1
            ).format
            == format
        )


@pytest.mark.slow
def test_gsm8k_through_every_stage(tmp_path: Path) -> None:
    """Five GRPO steps of a Qwen2-shaped model over the real training file, scored by
    math-verify."""
    path = DATA / "gsm8k_train.jsonl"
    if not path.is_file():
        pytest.skip(f"{path}: the GSM8K training file is not here (set LOWROLL_DATA)")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    questions = [json.loads(line)["question"] for line in path.read_text().splitlines()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    bpe.train_from_iterator(
        questions,
        trainers.BpeTrainer(
            vocab_size=1024,
            special_tokens=demo.SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = demo.CHAT_TEMPLATE
    fast.save_pretrained(tmp_path / "tokenizer")
    spec = spec_from_config(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": len(fast),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "eos_token_id": fast.eos_token_id,
        }
    )
    hf.save(
        initialize(Transformer(spec), 0), tmp_path / "model", tokenizer_from=tmp_path / "tokenizer"
    )
    result = train(
        {
            "model": str(tmp_path / "model"),
            "output_dir": str(tmp_path / "run"),
            "device": "cpu",
            "env": [{"id": "gsm8k", "args": {"path": str(path)}}],
            "batch_size": 16,
            "rollouts_per_example": 4,
            "rollout": {"weights": "int8", "max_tokens": 24, "cache_tokens": 16384},
            "train": {"max_steps": 5},
            "ckpt": {"interval": 5},
        }
    )
    assert len(result.records) == 5
    for record in result.records:
        assert record["rollout/num_samples"] == 16 and record["reward/error_rate"] == 0
        assert 0 <= record["reward/mean"] <= 1 and record["optim/skipped"] == 0
        assert abs(record["mismatch/kl_k1"]) < 0.1 and record["policy/entropy"] > 1
    batch = read_rollouts(tmp_path / "run" / "rollouts" / "step_000005.jsonl")
    assert len({s.prompt.id for s in batch.samples}) == 4
    from lowroll.metrics.report import write_report

    assert "gsm8k" in write_report(result.folder).read_text()
