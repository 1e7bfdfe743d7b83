"""Run by vLLM's own Python: the log-probs of given tokens under a model folder, as a JSON file.

    python vllm_scores.py ORDER.json ANSWER.json

ORDER holds `folder`, `dtype`, `sequences` and, for an adapter, `adapter` (a folder) and `rank`.
ANSWER holds `version` and `logprobs`, one list a sequence from its second token on; or `missing`,
the reason in vLLM's own words, when it does not know the folder's quantization method or chooses no
kernel for it on this machine. Any other error is an error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    VLLM_CPU_SGL_KERNEL="0",
)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    order_path, answer_path = map(Path, sys.argv[1:])
    order = json.loads(order_path.read_text())
    try:
        answer = answer_to(order)
    except (ValueError, NotImplementedError) as error:
        if not chose_no_kernel(error):
            raise
        answer = {"missing": str(error)}
    answer_path.write_text(json.dumps(answer))


def without_amx() -> None:
    """Let vLLM choose the kernels of a CPU without AMX: those that it has for AMX, INT8 and block
    FP8 among them, take bfloat16 activations alone ("expect A to be bfloat16 or half"), whose own
    spread is as wide as what INT8 rounds away here. It asks torch, and chooses in this process."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False
    if hasattr(
        torch._C._cpu, "_is_amx_tile_supported"
    ):  # an older torch, and where older vLLMs ask
        torch._C._cpu._is_amx_tile_supported = lambda: False


def answer_to(order: dict[str, Any]) -> dict[str, Any]:
    without_amx()
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    config = json.loads(Path(order["folder"], "config.json").read_text()).get("quantization_config")
    if config and config["quant_method"] not in QUANTIZATION_METHODS:
        return {
            "missing": f"quantization method {config['quant_method']}; it knows "
            f"{', '.join(QUANTIZATION_METHODS)}"
        }
    options: dict[str, Any] = {}
    if order.get(
        "adapter"
    ):  # without the list, prompt log-probs go through a wrapped lm_head and end the engine
        options = {
            "enable_lora": True,
            "max_lora_rank": order["rank"],
            "lora_target_modules": LINEARS,
        }
    llm = vllm.LLM(
        order["folder"],
        dtype=order["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        **options,
    )
    adapter = LoRARequest("policy", 1, order["adapter"]) if order.get("adapter") else None
    asked = vllm.SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in order["sequences"]]
    outputs = llm.generate(prompts, asked, lora_request=adapter, use_tqdm=False)
    logprobs = [
        [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        for output, ids in zip(outputs, order["sequences"], strict=True)
    ]
    return {"version": vllm.__version__, "logprobs": logprobs}


def chose_no_kernel(error: BaseException) -> bool:
    """Was the error raised where vLLM chooses a kernel for a quantized linear?"""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return last.endswith("model_executor/kernels/linear/__init__.py")


if __name__ == "__main__":
    main()
