"""The exact shapes of the Qwen2.5 models, as Hugging Face configs: speed depends on them and not on the values.

`SHAPES[name]` is a `config.json` that `lowroll.model.spec.spec_from_config`, transformers and vLLM read alike.
"""
from __future__ import annotations

from typing import Any


def _qwen(hidden: int, wide: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": hidden,
            "intermediate_size": wide, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": tied,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
            "initializer_range": 0.02, "use_sliding_window": False, "use_cache": True, "bos_token_id": 151643,
            "eos_token_id": 151645, "torch_dtype": "bfloat16"}


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _qwen(896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _qwen(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _qwen(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen(3584, 18944, 28, 28, 4, 152064, tied=False),
    "qwen2.5-14b": _qwen(5120, 13824, 48, 40, 8, 152064, tied=False),
    "qwen2.5-32b": _qwen(5120, 27648, 64, 40, 8, 152064, tied=False),
}
