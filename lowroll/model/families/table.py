"""The table of model families."""

from __future__ import annotations

from lowroll.model.families import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    llama,
    olmo,
    phi,
    qwen3_5,
    smollm3,
)
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
    Family("qwen3_next", "Qwen3NextForCausalLM", qwen3_5.qwen3_next, qwen3_5.KEYS),
    Family(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        qwen3_5.qwen3_5,
        qwen3_5.KEYS,
        inside=("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        qwen3_5.qwen3_5_moe,
        qwen3_5.KEYS,
        inside=("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
        lacks=("intermediate_size",),
    ),
    Family("granite", "GraniteForCausalLM", granite.granite, granite.KEYS),
    Family("seed_oss", "SeedOssForCausalLM", llama.seed_oss, ("attention_out_bias",)),
    Family("phi3", "Phi3ForCausalLM", phi.phi3),
    Family("glm", "GlmForCausalLM", glm.glm),
    Family("glm4", "Glm4ForCausalLM", glm.glm4),
    Family("glm4_moe", "Glm4MoeForCausalLM", glm.glm4_moe, glm.KEYS),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        deepseek.deepseek_v2,
        deepseek.KEYS,
        brings_code=True,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        deepseek.deepseek_v3,
        deepseek.KEYS,
        brings_code=True,
    ),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", deepseek.glm4_moe_lite, deepseek.KEYS),
    Family("gpt_oss", "GptOssForCausalLM", gpt_oss.gpt_oss, gpt_oss.KEYS),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ROWS}
