"""Dry runs of the recipes for newer families, on the configurations and sizes that are published."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll.cli.main import main
from lowroll.model.spec import read_spec, spec_from_config
from lowroll.runs import preflight
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.demo import build_tokenizer
from lowroll.runs.memory.plan import Planner
from tests.fixtures.published_configs import CONFIGS, published_folder

RECIPES = Path(__file__).parents[2] / "recipes"
CASES = {
    "qwen3_5_0_8b_fp8": "qwen3.5-0.8b",
    "gemma3_270m_int8": "gemma-3-270m",
    "glm4_9b_nvfp4": "glm-4-9b",
    "glm4_7_flash_nvfp4": "glm-4.7-flash",
    "gpt_oss_20b_mxfp4": "gpt-oss-20b",
}
# parameters of the text model, counted by hand from the sizes: embeddings, attention, recurrence,
# MLPs and norms, and corrections of routers
PARAMETERS = {
    "qwen3.5-0.8b": 752_393_024,
    "gemma-3-270m": 268_098_176,
    "glm-4-9b": 9_400_279_040,
    "glm-4.5-air": 106_852_251_264,
    "gpt-oss-20b": 20_914_757_184,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "moonlight-16b-a3b": 15_960_110_208,
    "glm-4.7-flash": 29_943_393_920,
}
# Of the bases that stay in codes: the weights in codes, the bits of one with its share of a scale, and
# the bytes of the adapter of rank 32. It has rows and columns of every matrix in float32, and in
# bfloat16 the copies that products read, in which the parts of qkv are beside each other.
GLM_SUMS = 8192 + 2 * 4352 + 8192 + 31488 + 17792
GLM_COPIES = 3 * 8704 + 8192 + 31488 + 17792
FLASH_REST = (768 + 5120) + (512 + 8960) + (5120 + 2048)  # behind the latents
FLASH_SUMS = (2048 + 768) + (2048 + 576) + FLASH_REST
FLASH_COPIES = 2 * (2048 + 768 + 576) + FLASH_REST
GPT_OSS_SUMS = 2 * (2880 + 4096) + 2 * (2880 + 512)
GPT_OSS_COPIES = 3 * (2880 + 5120) + 6976
IN_CODES = {
    "glm4_9b_nvfp4": (
        9_400_279_040 - 2 * 151_552 * 4096,  # all but two embeddings
        4 + 8 / 16,
        40 * 32 * (4 * GLM_SUMS + 2 * GLM_COPIES),
    ),
    "glm4_7_flash_nvfp4": (
        29_943_393_920 - 2 * 154_880 * 2048,
        4 + 8 / 16,
        47 * 32 * (4 * FLASH_SUMS + 2 * FLASH_COPIES),
    ),
    "gpt_oss_20b_mxfp4": (
        24 * 32 * 3 * 2880 * 2880,  # experts
        4 + 8 / 32,
        24 * 32 * (4 * GPT_OSS_SUMS + 2 * GPT_OSS_COPIES),
    ),
}
MEMORY = 80 * 10**9
UNITS = {"MB": 1e6, "GB": 1e9}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_configurations_have_the_parameters_of_their_models(name: str) -> None:
    assert spec_from_config(CONFIGS[name]).num_parameters == PARAMETERS[name]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are those of a GPU with 80 GB, wherever the test runs."""
    now = Planner.now

    def planner(*arguments: Any) -> Planner:
        compute = Compute(torch.device("cuda"), torch.bfloat16)
        return replace(now(*arguments), compute=compute, free=MEMORY, total=MEMORY)

    monkeypatch.setattr(preflight.Planner, "now", planner)


def rows(path: Path, first: int) -> Path:
    path.write_text(
        "".join(
            json.dumps({"question": f"What is {first} + {i}?", "answer": f"#### {first + i}"})
            + "\n"
            for i in range(20)
        )
    )
    return path


def bytes_of(plan: str, name: str) -> float:
    """Return the bytes that a row of the memory's table has in its first phase."""
    row = re.search(rf"^#? *{name} +(.*)$", plan, re.MULTILINE)
    assert row is not None, name
    number, unit = re.findall(r"([\d.]+) (MB|GB)", row[1])[0]
    return float(number) * UNITS[unit]


@pytest.mark.parametrize("recipe", CASES)
def test_recipes_of_newer_families_plan_on_published_sizes(
    recipe: str, tmp_path: Path, on_a_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run finds no problem, and what it says of weights, keys and states is what the sizes
    make by hand: bytes of the learner's weights and of the rollouts' own, of a token's keys and
    values in all layers, and of a sample's states."""
    folder = published_folder(tmp_path / "m", CASES[recipe])
    build_tokenizer().save_pretrained(folder)
    settings = [
        f"model={folder}",
        f"output_dir={tmp_path / 'run'}",
        "score.workers=1",
        "device=cpu",
    ]
    if "gsm8k" in (RECIPES / f"{recipe}.yaml").read_text():
        train, test = rows(tmp_path / "train.jsonl", 1), rows(tmp_path / "test.jsonl", 2)
        settings += [f"env.0.args.path={train}", f"env.0.args.test_path={test}"]
    assert main(["grpo", str(RECIPES / f"{recipe}.yaml"), *settings, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "memory on cuda: " in plan and f"of {MEMORY / 1e9:.0f} GB that are free" in plan
    spec = read_spec(folder)
    codes, bits, adapter = IN_CODES.get(recipe, (0, 0, 0))
    learner = codes * bits / 8 + 2 * (spec.num_parameters - codes) + adapter
    assert bytes_of(plan, "learner's weights") == pytest.approx(learner, rel=0.03)
    if recipe not in IN_CODES:  # a byte a weight, and the embedding once more
        rollouts = spec.num_parameters + spec.vocab_size * spec.hidden_size
        assert bytes_of(plan, "rollouts' weights") == pytest.approx(rollouts, rel=0.03)
    with_keys = sum(spec.layers_with_keys)
    held = re.search(r"the KV cache holds ([\d,]+) tokens", plan)
    assert held is not None
    keys = int(held[1].replace(",", "")) * with_keys * 2 * spec.num_kv_heads * spec.head_dim * 2
    assert bytes_of(plan, "KV cache") == pytest.approx(keys, rel=0.03)
    if spec.delta is not None:
        state = spec.delta.value_heads * spec.delta.key_dim * spec.delta.value_dim * 4
        state += spec.delta.channels * spec.delta.taps * 2
        states = 256 * (spec.num_layers - with_keys) * state
        assert bytes_of(plan, "policy's state") == pytest.approx(states, rel=0.03)
