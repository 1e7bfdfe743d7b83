"""Families beside Qwen3 on a CPU: which parameters count, and a whole comparison of small models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import families

SMALL = {
    "vocab_size": 96,  # as many numbers in the head as in a layer's gate and up
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setitem(families.SIZES, name, value)
    for name, value in {"ROWS": 2, "STEPS": 2, "PROMPTS": 4, "LENGTH": 8, "LEARNT": 4}.items():
        monkeypatch.setattr(families, name, value)


def test_a_token_counts_the_experts_that_it_goes_to() -> None:
    hidden, head = 32, 96 * 32
    attention = 4 * 4 * hidden * 2 * 16  # layers; q, k, v and o; two heads of 16
    dense = 4 * 3 * hidden * 48
    assert (
        families.parameters_of_a_token(families.model_of("qwen3"), 0.25) == head + attention + dense
    )
    routed = 4 * (families.CHOSEN * 3 * hidden * 16 + families.EXPERTS * hidden)
    mixture = families.model_of("qwen3_moe")
    assert families.parameters_of_a_token(mixture, 0.25) == head + attention + routed
    others = 4 * (families.EXPERTS - families.CHOSEN) * 3 * hidden * 16
    assert families.parameters_of_a_token(mixture, 1.0) == head + attention + routed + others


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_has_a_model_of_the_common_sizes(family: str) -> None:
    model = families.model_of(family)
    assert (
        0 < families.parameters_of_a_token(model, 1.0) <= sum(p.numel() for p in model.parameters())
    )


@pytest.mark.slow
def test_families_are_compared_with_their_reference(tmp_path: Path) -> None:
    names = ["llama", "qwen3_5_text", "deepseek_v2", "gpt_oss"]
    families.main(["--families", *names, "--rounds", "1", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "families.json").read_text())["rows"]
    wanted = {"llama": "qwen3", "qwen3_5_text": "qwen3"}
    parts = ("decode", "prefill", "learn")
    expected = {f"{n}: {part} / {wanted.get(n, 'qwen3_moe')}" for n in names for part in parts}
    assert {row["name"] for row in rows} == expected
    assert all(row["ours"] > 0 and row["peer"] > 0 and row["must"] == 0.83 for row in rows)
