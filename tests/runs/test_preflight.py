"""`--dry-run` fails when the run would, in a few seconds, writes nothing, and its memory plan is
that of the run."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from lowroll import Engine
from lowroll.cli.main import main
from lowroll.config import from_mapping, load
from lowroll.config.kv import KvConfig
from lowroll.kv.capacity import Workload
from lowroll.kv.policy.table import make
from lowroll.model.spec import read_spec
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor
from lowroll.runs import budget, demo
from lowroll.runs.build import trainer
from lowroll.runs.build.compute import Compute
from lowroll.runs.folder import RunFolder
from lowroll.runs.grpo import Run
from lowroll.runs.preflight import look_at_run
from lowroll.trainer.muon import hidden_matrices
from lowroll.trainer.optim import Optimizer

TINY = {
    **demo.CONFIG,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
WORDS = {"template": "{text}", "max_words": 1, "min_len": 3, "max_len": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.build_model(tmp_path_factory.mktemp("preflight") / "model", 0, TINY)


def tree(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "output_dir": str(out),
        "device": "cpu",
        "score": {"workers": 1},
        "env": [{"id": "reverse-text", "args": WORDS}],
        "batch_size": 8,
        "rollouts_per_example": 4,
        "rollout": {"max_tokens": 6},
        **changes,
    }


SCORER = """from lowroll.envs import Environment
from lowroll.types import Score


class Env(Environment):
    def prompt(self, index, split="train"):
        return self.ask(f"task {index}", index, split, {})

    def score(self, prompt, text):
        return %s

    def gold(self, prompt):
        return "yes"

    def perturbed(self, prompt):
        return "no"
"""


@pytest.mark.slow
def test_a_dry_run_fails_where_the_run_would(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raises.py").write_text(SCORER % "1 / 0")
    Path("strict.py").write_text(SCORER % "Score(0.25)")
    Path("silent.py").write_text(
        (SCORER % "None").replace('return "yes"', "raise NotImplementedError")
    )
    Path("old").mkdir()
    Path("old/metrics.jsonl").write_text('{"step": 1}\n')
    Path("old/config.yaml").write_text(
        "# lowroll grpo: the settings of the run in this folder\nmodel: m\n"
    )
    Path("run.yaml").write_text(json.dumps(tree(model, tmp_path / "out")))
    before = sorted(tmp_path.rglob("*"))

    def errors(*overrides: str) -> str:
        assert main(["grpo", "run.yaml", *overrides, "--dry-run"]) == 2, overrides
        out, err = capsys.readouterr()
        assert out.startswith("# model ")  # the plan is printed all the same
        return "".join(line + "\n" for line in err.splitlines() if line.startswith("error: "))

    two = errors(
        "env.0.id=reverse_text", "env.0.args={}", "train.lora=true", "train.lora_target_modules=[x]"
    )
    assert "unknown environment 'reverse_text' (did you mean 'reverse-text'?)" in two
    assert "error: lora_target_modules: expected" in two  # every problem in one look
    assert "error: score.workers: 100000 is more than the " in errors("score.workers=100000")
    assert "max_wordz" in errors("env.0.args={max_wordz: 2}")
    scorer = errors("env=[{id: raises.py}]")
    assert (
        "raises.py': its scorer fails on 8 of 8 of its own answers" in scorer
        and "ZeroDivisionError" in scorer
    )
    assert "neither a folder nor a hub id" in errors("model=nowhere")
    assert "train.tokens_per_microbatch: 8 tokens are too few: the" in errors(
        "train.tokens_per_microbatch=8"
    )
    assert "leaves no room for a prompt" in errors(
        "rollout.max_tokens=4096", "train.tokens_per_microbatch=8192"
    )
    assert "memory: the run holds" in errors("rollout.cache_tokens=1000000000000")
    assert "already holds a run; continue it with --resume" in errors("output_dir=old")
    assert "no CUDA device" in errors("device=cuda") or torch.cuda.is_available()
    assert "score.workers: 100000 is more than" in errors("score.workers=100000")
    assert "output_dir: run.yaml/out cannot be written: " in errors("output_dir=run.yaml/out")
    assert "8 of 8 responses (invalid: " in errors(
        "env=[{id: silent.py}]"
    )  # though it knows no answer of its own
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    try:
        assert "model.safetensors: damaged" in errors()
    finally:
        weights.write_bytes(whole)
    assert main(["grpo", "run.yaml", "env=[{id: strict.py}]", "--dry-run"]) == 0
    assert "8 of 8 of its own answers score below 1" in capsys.readouterr().err
    assert [
        path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts
    ] == before


def test_sft_has_one_too(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        json.dumps(
            tree(model, tmp_path / "out", sft={"num_examples": 16, "steps": 3, "batch_size": 4})
        )
    )
    assert main(["sft", str(path), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "# 16 demonstrations of" in out and "3 steps of 4" in out and "# memory on cpu: " in out
    (tmp_path / "again.yaml").write_text(out)
    assert load(tmp_path / "again.yaml").sft.steps == 3
    (tmp_path / "bad.jsonl").write_text('{"messages": [1]}\n')
    for override, told in (
        ("sft.data=nowhere.jsonl", "sft.data: nowhere.jsonl: no such file"),
        (f"sft.data={tmp_path}/bad.jsonl", "bad.jsonl:1: messages[0]"),
        ("env.0.id=reverse_text", "did you mean 'reverse-text'?"),
    ):
        assert main(["sft", str(path), override, "--dry-run"]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "train": {"lora": True, "lora_rank": 4, "optimizer": "adamw8bit"},
            "rollout": {"weights": "nf4"},
        },
        {
            "train": {"optimizer": "muon", "forward": "aligned"},
            "dtype": "bfloat16",
            "rollout": {"weights": "int8"},
        },
    ],
    ids=["full", "lora", "aligned"],
)
def test_the_memory_plan_is_what_the_run_holds(
    changes: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    values = tree(model, tmp_path / "out", **changes)
    values["rollout"] = {"max_tokens": 6, **changes.get("rollout", {})}
    cfg = from_mapping(values).resolved()
    compute = Compute.of(cfg)
    shapes = Transformer(read_spec(model), "meta", compute.dtype)
    with ExitStack() as stack:
        session = Run(RunFolder(cfg, "grpo"), stack)
        assert look_at_run(cfg).problems == []
        planned = budget.plan(cfg, compute, shapes, session.rollouts.workloads(), {})
        learner, engine = session.model, session.rollouts.engine.model
        assert planned.cache_tokens == session.rollouts.engine.stats().cache_tokens
        assert (
            planned.parts["KV cache"] == planned.cache_tokens * 2 * 2 * 16 * compute.dtype.itemsize
        )
        mine = tensors(learner) | {
            f"{name}.aligned.{key}": t
            for name, linear in learner.linears()
            if linear.aligned is not None
            for key, t in linear.aligned.tensors.items()
        }
        assert planned.parts["learner's weights"] == size(mine)
        shared = {t.data_ptr() for t in mine.values()}
        own = size({name: t for name, t in tensors(engine).items() if t.data_ptr() not in shared})
        kept = (
            4 * budget.linear_size(shapes) if cfg.rollout.weights == "nf4" else 0
        )  # dequantized, once used
        assert planned.parts["rollouts' weights"] == own + kept
        optimizer = Optimizer(
            learner.trainable_parameters(), trainer.optim(cfg), hidden_matrices(learner)
        )
        for master in optimizer.masters.values():
            master.grad = torch.ones_like(master)
        optimizer.begin_step()
        optimizer.update()
        gradients = sum(4 * master.numel() for master in optimizer.masters.values())
        if not optimizer.in_8_bits:  # which keeps 32 in tensors as small as these
            assert planned.parts["its optimiser"] == size(optimizer.state()[0]) + gradients


def test_the_state_of_a_cache_policy_is_in_the_memory_plan(model: Path, tmp_path: Path) -> None:
    """The same bytes as the engine's; the cache has what is left of its share."""
    values = tree(model, tmp_path / "out", rollout={"max_tokens": 6, "max_batch": 8})
    cfg = from_mapping(values).resolved()
    compute = Compute.of(cfg)
    shapes = Transformer(read_spec(model), "meta", compute.dtype)
    load = [Workload(2, 4, 20, 6)]
    for name in ("dense", "snapkv", "h2o"):
        options = {} if name == "dense" else {"budget": 12, "buffer": 4}
        kv = make(name, **options)
        rollout = cfg.rollout.with_kv(KvConfig(policy=name, **options))
        bounded = cfg.model_copy(update={"rollout": rollout})
        planned = budget.plan(bounded, compute, shapes, load, {})
        engine = Engine(
            model, weights="int8", kv=kv, device="cpu", max_batch=8, workloads=load
        ).stats()
        assert planned.parts["its policy's state"] == engine.policy_bytes
        assert planned.cache_tokens == engine.cache_tokens
        assert ("its policy's state" in planned.lines()[1]) == (name != "dense")
        train = bounded.train.model_copy(update={"replay_kv": True})
        replayed = bounded.model_copy(update={"train": train})
        planned = budget.plan(replayed, compute, shapes, load, {})
        recording = Engine(
            model, weights="int8", kv=kv, device="cpu", max_batch=8, record_evictions=True
        ).stats()
        assert planned.parts["its policy's state"] == recording.policy_bytes
        assert (recording.policy_bytes > engine.policy_bytes) == (name != "dense")
    many = {"max_batch": 10**12, "kv": KvConfig(policy="snapkv")}
    crowd = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=many)})
    planned = budget.plan(crowd, compute, shapes, load, {})
    assert planned.cache_tokens == 0
    assert "of it its policy's state" in planned.problem()
    assert planned.problem().endswith("a smaller rollout.max_batch takes less")


def tensors(model: Transformer) -> dict[str, torch.Tensor]:
    """Every tensor of a model's weights, codes and scales included."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, linear in model.linears():
        if isinstance(linear.weight, QTensor):
            found |= {f"{name}.{key}": tensor for key, tensor in linear.weight.tensors.items()}
    return found


def size(named: dict[str, torch.Tensor]) -> int:
    """Bytes, each storage once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in named.values()}.values())


def test_a_model_of_the_hub_is_looked_at_without_its_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "snapshot"
    shutil.copytree(model, small, ignore=shutil.ignore_patterns("*.safetensors"))
    asked: list[list[str]] = []

    def snapshot_download(
        name: str, revision: str | None, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        assert not local_files_only
        asked.append(allow_patterns)
        return str(small)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = look_at_run(from_mapping(tree(Path("owner/name"), tmp_path / "out")))
    assert found.problems == []
    assert found.notes == ["model: owner/name is a hub id; its weights are not looked at"]
    assert any(line.startswith("memory on cpu: ") for line in found.lines)
    assert asked and all("*.safetensors" not in patterns for patterns in asked)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"algorithm": "ppo", "rollouts_per_example": 1, "critic": {"model": "nowhere"}},
            "critic.model: 'nowhere' is neither a folder",
        ),
        (
            {
                "correction": "aipo",
                "loss": {"aipo": {"teacher_tau": 0.1}},
                "train": {"teacher": "nowhere"},
            },
            "train.teacher: 'nowhere' is",
        ),
        (
            {"eval": {"interval": 1, "env": {"id": "gsm8k", "args": {"path": "only.jsonl"}}}},
            "has no test split",
        ),
        ({"env": {"id": "gsm8k", "args": {"path": "bad.jsonl"}}}, "bad.jsonl:1: "),
    ],
)
def test_what_a_run_reads_beside_its_model(
    changes: dict[str, Any], told: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("only.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    Path("bad.jsonl").write_text("{}\n")
    (problem,) = look_at_run(from_mapping(tree(model, tmp_path / "out", **changes))).problems
    assert told in problem
