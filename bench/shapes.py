"""The exact shapes of Qwen2.5 and Qwen3-30B-A3B, as Hugging Face configs: speed depends on them and
not on the values.

`SHAPES[name]` is a `config.json` that lowroll, transformers and vLLM read alike. `random_model` fills it
with N(0, 0.02) matrices, unit norms and zero biases. The same seed gives the same weights on the same
kind of device, so a model can be dropped and made again.

In a mixture of experts speed does depend on the routes, and random weights would send most tokens
the same way: what attention adds is nearly common to the rows of a group and drowns the token. So a
router reads features of the residual stream that the embedding alone writes: it sees which token is
there, and tokens are drawn evenly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Block, Transformer


def _qwen(
    hidden: int, wide: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    }


SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **_qwen(576, 1536, 30, 9, 3, 49152, tied=True),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2.5-0.5b": _qwen(896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _qwen(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _qwen(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen(3584, 18944, 28, 28, 4, 152064, tied=False),
    "qwen2.5-14b": _qwen(5120, 13824, 48, 40, 8, 152064, tied=False),
    "qwen2.5-32b": _qwen(5120, 27648, 64, 40, 8, 152064, tied=False),
    "qwen3-30b-a3b": {
        **_qwen(2048, 6144, 48, 32, 4, 151936, tied=False),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "max_position_embeddings": 40960,
        "attention_bias": False,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
}

TINY: dict[str, Any] = {  # for a look whether a command runs; not among SHAPES
    **_qwen(448, 1024, 2, 7, 1, 4096, tied=True),
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@torch.no_grad()
def random_model(
    config: dict[str, Any],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Transformer:
    """Return a frozen decoder of these sizes with seeded random weights, made on the device."""
    model = Transformer(spec_from_config(config), device, dtype)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            p.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            p.normal_(0.0, 0.02, generator=generator)
    if model.spec.mixture.num_experts:
        _route_by_token(model)
    return model.requires_grad_(False).eval()


def _route_by_token(model: Transformer) -> None:
    """Make every expert as likely as any other, whatever the context (`bench.roofline.touched` counts)."""
    reserved = model.spec.hidden_size // 16
    for block in model.blocks:
        assert isinstance(block, Block) and block.experts is not None
        experts = block.experts
        o, down, router = block.o.weight, experts.down.weight, experts.router.weight
        assert isinstance(o, Tensor) and isinstance(down, Tensor)
        o[:reserved] = 0.0
        down.unflatten(0, (model.spec.mixture.num_experts, -1))[:, :reserved] = 0.0
        router[:, reserved:] = 0.0
        router.div_(router.norm(dim=1, keepdim=True))  # a longer row would be chosen more often
