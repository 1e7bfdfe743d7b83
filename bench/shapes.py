"""The shapes that speed is measured on: config.json of the real models, without their weights.

Speed does not depend on the values, so the weights are random and made where they are needed: N(0, 0.02) matrices by
the device's own generator, unit norms, zero biases. 7 B parameters take a fraction of a second on a GPU. The same
seed gives the same weights on the same kind of device, so that a model can be dropped and made again.
"""
from __future__ import annotations

from typing import Any

import torch

from lowroll.model.spec import ModelSpec, spec_from_config
from lowroll.model.transformer import Transformer

_QWEN: dict[str, Any] = {
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "bos_token_id": 151643, "eos_token_id": 151645, "initializer_range": 0.02,
    "use_cache": True, "use_sliding_window": False}


def _qwen2(hidden: int, wide: int, layers: int, heads: int, kv_heads: int, vocab: int = 152064,
           **changes: Any) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_QWEN, "hidden_size": hidden,
            "intermediate_size": wide, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "vocab_size": vocab, **changes}


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8),
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_QWEN, "max_position_embeddings": 40960,
        "attention_bias": False, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False,
        "router_aux_loss_coef": 0.001},
}


@torch.no_grad()
def random_model(config: dict[str, Any], device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16,
                 seed: int = 0) -> Transformer:
    """A frozen decoder of these sizes with seeded random weights, made on the device."""
    model = Transformer(spec_from_config(config), device, dtype)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            p.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            p.normal_(0.0, 0.02, generator=generator)
    return model.requires_grad_(False).eval()


def kv_bytes_per_token(spec: ModelSpec, itemsize: int = 2) -> int:
    """Bytes of keys and values that one token leaves in the cache."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize
