"""The recipes: what they hold is what was published, every one plans, and a small twin of each runs
three steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lowroll
from lowroll.cli.main import main
from lowroll.config import RunConfig, load
from lowroll.model import hf

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
# settings of ours, for models that no paper of low-bit rollouts has trained
OURS = (
    *("gemma3_270m_int8", "glm4_9b_nvfp4", "glm4_7_flash_nvfp4"),
    *("gpt_oss_20b_mxfp4", "qwen3_5_0_8b_fp8"),
)
PAPERS = [path.stem for path in RECIPES if path.stem not in OURS]


def recipe(name: str) -> RunConfig:
    return load(ROOT / "recipes" / f"{name}.yaml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_plans_and_its_settings_load_again(
    path: Path, tmp_path: Path, unseen: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["grpo", str(path), "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert plan.startswith("# the run would start") and "\n# model " in plan
    assert len(plan.splitlines()) <= 32  # without the memory's table, which has 16 lines
    assert max(map(len, plan.splitlines())) <= 100
    (tmp_path / "again.yaml").write_text(plan)
    assert load(tmp_path / "again.yaml").dump() == load(path).dump()


def test_each_is_listed_and_says_where_it_comes_from() -> None:
    listed = (ROOT / "recipes/README.md").read_text()
    for path in RECIPES:
        head = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
        source = r"Table \d|section \d|repository|Quick Start"
        source = r"A setting of ours, of no paper" if path.stem in OURS else source
        assert re.search(source, head), path.name
        assert f"lowroll grpo recipes/{path.name}" in head, path.name
    assert set(re.findall(r"\]\((\w+\.yaml)\)", listed)) == {path.name for path in RECIPES}


# as printed: prompts a step, rollouts a prompt, longest response, learning rate, updates a step, KL
# coefficient, the rollouts' weights, the correction; then the steps, where the source says them
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "qurl_gsm8k_ppo_int8": (256, 1, 512, 1e-5, 256 // 64, 0.0, "int8", "acr", 15 * (7473 // 256)),
    "qurl_dapo_int8": (512, 16, 3072, 1e-6, 16, 0.0, "int8", "acr", 200),
    "qurl_deepscaler_int8": (256, 8, 8192, 1e-6, 4, 1e-3, "int8", "acr", 800 + 400 + 400),
    "surogate_reverse_text": (128 // 16, 16, 128, 2e-4, 1, 0.0, "dense", "aipo", 40),
    "dapo_aime": (512, 16, 16384 + 4096, 1e-6, 512 * 16 // 512, 0.0, "dense", "none"),
    "dr_grpo_math": (128, 8, 3000, 1e-6, 128 * 8 // 128, 0.0, "dense", "none", 20 * 12000 // 128),
    "deepseekmath_grpo": (1024 // 64, 64, 1024, 1e-6, 1, 0.04, "dense", "none"),
    "sparse_rl_dense_baseline": (1024 // 8, 8, 4096, 1e-6, 1024 // 256, 1e-4, "dense", "none", 400),
    **{
        f"sparse_rl_{name}": (1024 // 8, 8, 4096, 1e-6, 1024 // 256, 1e-4, "dense", "sparse", 400)
        for name in ("rkv", "snapkv")
    },
    "qerl_gsm8k_bf16_lora": (128 // 8, 8, 4096, 5e-6, 4, 0.0, "bf16", "none"),
    **{
        f"qerl_gsm8k_{size}_nvfp4": (128 // 8, 8, 4096, 1e-5, 4, 0.0, "nvfp4", "none")
        for size in ("3b", "7b")
    },
    **{
        f"qerl_bigmath_{size}_nvfp4": (128 // 16, 16, 8192, 1e-5, 1, 0.0, "nvfp4", "none")
        for size in ("7b", "14b", "32b")
    },
    **{
        f"qarl_{size}_int4": (512, 8, length, 1e-6, 512 // 64, 0.0, "int4", "tbpo")
        for size, length in (("1_5b", 4096 - 1024), ("7b", 4096 - 1024), ("8b", 16384))
    },
}


@pytest.mark.parametrize("name", PAPERS)
def test_it_holds_the_published_numbers(name: str) -> None:
    cfg = recipe(name)
    numbers = (
        cfg.num_groups,
        cfg.rollouts_per_example,
        cfg.rollout.max_tokens,
        cfg.train.learning_rate,
        cfg.train.minibatches,
        cfg.loss.kl_coef,
        cfg.rollout.weights,
        cfg.correction,
        cfg.train.max_steps,
    )
    assert numbers[: len(PUBLISHED[name])] == PUBLISHED[name]


@pytest.mark.parametrize("name", [path.stem for path in RECIPES if path.stem.startswith("qerl")])
def test_qerl(name: str) -> None:
    cfg = recipe(name)
    assert (cfg.loss.eps_low, cfg.loss.eps_high, cfg.rollout.temperature) == (0.2, 0.28, 1.0)
    assert (cfg.eval.temperature, cfg.eval.top_p) == (0.6, 0.95)
    assert cfg.train.lora and cfg.train.lora_rank == 32 and cfg.train.optimizer == "adamw8bit"
    assert (
        cfg.algorithm == ("dapo" if "bigmath" in name else "grpo")
        and 500 <= cfg.train.max_steps <= 1000
    )
    if "nvfp4" in name:
        assert (cfg.noise.sigma_start, cfg.noise.sigma_end, cfg.noise.schedule) == (
            1e-2,
            5e-4,
            "exponential",
        )
        assert cfg.model == f"Qwen/Qwen2.5-{name.split('_')[2].upper()}-Instruct"


@pytest.mark.parametrize("name", [path.stem for path in RECIPES if path.stem.startswith("qarl")])
def test_qarl(name: str) -> None:
    cfg = recipe(name)
    assert (cfg.loss.eps_low, cfg.loss.eps_high, cfg.loss.tbpo.eps_negative, cfg.loss.cap) == (
        3e-4,
        4e-4,
        7e-4,
        2.0,
    )
    assert (cfg.train.forward, cfg.train.optimizer, cfg.train.weight_decay) == (
        "aligned",
        "muon",
        0.01,
    )
    assert cfg.train.tokens_per_microbatch == 22528 and cfg.eval.temperature == 0.6


def test_qurl() -> None:
    scales = [
        recipe(f"qurl_{name}_int8").train.uaq_scale for name in ("gsm8k_ppo", "dapo", "deepscaler")
    ]
    assert scales == [None, 1.5, 1.5]
    ppo = recipe("qurl_gsm8k_ppo_int8")
    assert (
        ppo.algorithm,
        ppo.critic.learning_rate,
        ppo.critic.value_clip,
        ppo.critic.gamma,
        ppo.critic.lam,
        ppo.critic.model,
    ) == ("ppo", 1e-5, 0.5, 1.0, 1.0, None)
    for name in ("qurl_dapo_int8", "dapo_aime"):
        assert (
            recipe(name).eval.temperature,
            recipe(name).eval.top_p,
            recipe(name).rollout.top_p,
        ) == (1.0, 0.7, 1.0)
    cfg = recipe("qurl_deepscaler_int8")
    assert [
        (now.rollout.max_tokens, now.rollouts_per_example, now.num_groups)
        for now in map(cfg.at, (1, 800, 801, 1200, 1201, 1600))
    ] == [(8192, 8, 256)] * 2 + [(16384, 16, 256)] * 2 + [(24576, 16, 256)] * 2
    assert cfg.rollout.temperature == 0.6


@pytest.mark.parametrize("name", ["rkv", "snapkv"])
def test_sparse_rl(name: str) -> None:
    cfg, dense = recipe(f"sparse_rl_{name}"), recipe("sparse_rl_dense_baseline")
    scored = {"budget": 512, "buffer": 128, "window": 8, "kernel": 7}
    mixed = {"mix": 0.1, "zero_first": False} if name == "rkv" else {}
    assert cfg.rollout.cache.name == name and cfg.rollout.cache.options == scored | mixed
    sparse = cfg.loss.sparse
    assert (sparse.veto, sparse.xi_cap, sparse.token_rs, sparse.normalize_xi) == (
        1e-4,
        None,
        None,
        False,
    )
    same = {"output_dir": "", "rollout": dense.rollout, "correction": "none", "loss": dense.loss}
    assert cfg.model_copy(update=same).dump() == dense.model_copy(update=same).dump()


# -- twins -----------------------------------------------------------------------------------------

# what every twin changes: the model, the task, and how much of everything
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "rollout.max_tokens": 5,
    "rollout.cache_tokens": 1024,
    "env": [
        {
            "id": "reverse-text",
            "args": {"template": "{text}", "max_words": 1, "min_len": 2, "max_len": 4},
        }
    ],
    "batch_size": 16,
    "rollouts_per_example": 8,
    "train.minibatches": 2,
    "train.max_steps": 3,
    "train.tokens_per_microbatch": 256,
    "train.learning_rate": 1e-2,
    "train.warmup_steps": 0,
    "train.weight_metrics": False,
    "score.workers": 1,
    "eval.interval": None,
    "ckpt.interval": 3,
}
DAPO = {"dapo.max_rounds": 32}
OVERLONG = {**DAPO, "dapo.overlong_max": 5, "dapo.overlong_cache": 2}
ONE_UPDATE = {"train.minibatches": 1}
LORA = {"train.lora_rank": 4, "train.lora_alpha": 8}
NOISE = {"noise.num_stages": 3}
FORGETFUL = {"rollout.kv.budget": 9, "rollout.kv.buffer": 2}
STAGES = [
    {"step": 2, "max_tokens": 6, "rollouts_per_example": 16, "batch_size": 32},
    {"step": 3, "max_tokens": 8},
]
# what one twin changes beside: only sizes, so that everything else is the recipe's own
TWINS: dict[str, dict[str, Any]] = {
    "dapo_aime": OVERLONG,
    "deepseekmath_grpo": ONE_UPDATE,
    "gemma3_270m_int8": {},
    "glm4_9b_nvfp4": LORA,
    "qwen3_5_0_8b_fp8": {},
    "dr_grpo_math": {},
    "qarl_1_5b_int4": {},
    "qarl_7b_int4": {},
    "qarl_8b_int4": {},
    "qerl_bigmath_14b_nvfp4": {**DAPO, **ONE_UPDATE, **LORA, **NOISE},
    "qerl_bigmath_32b_nvfp4": {**DAPO, **ONE_UPDATE, **LORA, **NOISE},
    "qerl_bigmath_7b_nvfp4": {**DAPO, **ONE_UPDATE, **LORA, **NOISE},
    "qerl_gsm8k_3b_nvfp4": {**LORA, **NOISE},
    "qerl_gsm8k_7b_nvfp4": {**LORA, **NOISE},
    "qerl_gsm8k_bf16_lora": LORA,
    "qurl_dapo_int8": OVERLONG,
    "qurl_deepscaler_int8": {"stages": STAGES},
    "qurl_gsm8k_ppo_int8": {"rollouts_per_example": 1},
    "sparse_rl_dense_baseline": {},
    "sparse_rl_rkv": FORGETFUL,
    "sparse_rl_snapkv": FORGETFUL,
    "surogate_reverse_text": {**ONE_UPDATE, **LORA},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_runs_three_steps(name: str, model: Path, tmp_path: Path) -> None:
    changes = {**SMALL, **TWINS[name], "model": str(model), "output_dir": str(tmp_path / "run")}
    cfg, published = load(ROOT / "recipes" / f"{name}.yaml", changes), recipe(name)
    assert (
        cfg.algorithm,
        cfg.correction,
        cfg.loss,
        cfg.rollout.weights,
        cfg.train.forward,
        cfg.train.optimizer,
    ) == (
        published.algorithm,
        published.correction,
        published.loss,
        published.rollout.weights,
        published.train.forward,
        published.train.optimizer,
    )
    result = lowroll.run(cfg)
    assert [record["step"] for record in result.records] == [1, 2, 3]
    for record in result.records:
        assert record["optim/skipped"] == 0 and abs(record["mismatch/kl_k1"]) < 0.1
        assert ("critic/loss" in record) == (published.algorithm == "ppo")
        assert ("policy/kl_reference" in record) == (published.loss.kl_coef > 0)
    assert max(record["optim/grad_norm"] for record in result.records) > 0
    before, after = (
        lowroll.score(folder, [[6, 7, 8]], [1])[0] for folder in (model, result.folder / "final")
    )
    assert not torch.equal(before, after)
    assert [record.get("rollout/noise_sigma", 0) > 0 for record in result.records] == [False] + [
        published.noise is not None
    ] * 2
    assert [record.get("rollout/max_tokens") for record in result.records] == (
        [5, 6, 8] if published.stages else [None] * 3
    )
    if published.train.uaq_scale is not None:
        assert (
            published.train.uaq_scale == 1.5
            and "1.5" in (result.folder / "final/config.json").read_text()
        )
    if not published.train.lora:
        assert (
            hf.load(result.folder / "final").spec.num_parameters
            == hf.load(model).spec.num_parameters
        )
