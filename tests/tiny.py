"""Small models of every supported family, made by transformers, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

COMMON = dict(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-bias": (
        "Qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-bias": ("Qwen3Moe", {**EXPERTS, "num_experts_per_tok": 3, "attention_bias": True}),
    "llama": ("Llama", {}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 12}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-mqa": ("Mistral", {"sliding_window": 256, "num_key_value_heads": 1}),
}


def hf_model(family: str = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """A random transformers model whose norms and biases are random too, so that no flag can
    hide."""
    kind, special = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **special, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                1 + 0.3 * torch.randn_like(p)
                if p.ndim == 1 and p.mean() > 0.5
                else 0.3 * torch.randn_like(p)
            )
    return model


def hf_folder(path: Path, family: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """The same model saved as a Hugging Face folder."""
    hf_model(family, seed, **changes).save_pretrained(path)
    return path
