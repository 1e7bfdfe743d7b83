"""The table of model families."""

from __future__ import annotations

from lowroll.model.families import gemma, glm, granite, llama, olmo, phi, smollm3
from lowroll.model.families.base import Family

_ROWS = (
    Family("qwen2", "Qwen2ForCausalLM", llama.qwen2),
    Family("qwen3", "Qwen3ForCausalLM", llama.qwen3),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", llama.qwen3_moe),
    Family("llama", "LlamaForCausalLM", llama.llama),
    Family("mistral", "MistralForCausalLM", llama.mistral),
    Family("smollm3", "SmolLM3ForCausalLM", smollm3.smollm3, smollm3.KEYS),
    Family("olmo2", "Olmo2ForCausalLM", olmo.olmo2),
    Family("olmo3", "Olmo3ForCausalLM", olmo.olmo3),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        gemma.gemma3_text,
        gemma.KEYS,
        "hidden_activation",
        "gelu_pytorch_tanh",
    ),
    Family("granite", "GraniteForCausalLM", granite.granite, granite.KEYS),
    Family("seed_oss", "SeedOssForCausalLM", llama.seed_oss, ("attention_out_bias",)),
    Family("phi3", "Phi3ForCausalLM", phi.phi3),
    Family("glm", "GlmForCausalLM", glm.glm),
    Family("glm4", "Glm4ForCausalLM", glm.glm4),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ROWS}
