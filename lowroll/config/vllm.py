"""The `rollout.vllm:` section.

rollout: {engine: vllm, weights: dense}
rollout: {engine: vllm, weights: dense, vllm: {url: "http://127.0.0.1:8000"}}
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, Strict
from pydantic_core import PydanticCustomError

from lowroll.config.section import Count, Section, Text

# options of `vllm serve` from the run's settings
FROM_RUN = {
    "--model": "model",
    "--served-model-name": "model",
    "--tokenizer": "model",
    "--host": "rollout.vllm.url",
    "--port": "rollout.vllm.url",
    "--uds": "rollout.vllm.url",
    "--api-key": "rollout.vllm.token_env",
    "--dtype": "rollout.vllm.dtype",
    "--tensor-parallel-size": "rollout.vllm.tensor_parallel_size",
    "--gpu-memory-utilization": "rollout.vllm.gpu_memory_utilization",
    "--max-model-len": "train.tokens_per_microbatch",
    "--max-num-seqs": "rollout.max_batch",
    "--enable-lora": "train.lora",
    "--max-lora-rank": "rollout.vllm.max_lora_rank",
    "--max-loras": "train.lora",
    "--lora-modules": "train.lora",
    "--lora-target-modules": "train.lora_target_modules",
    "--weight-transfer-config": "rollout.vllm.transfer",
    "--generation-config": "rollout",
    "--skip-tokenizer-init": "rollout.stop",
    "--quantization": "rollout.weights",
    "--seed": "seed",
    "--config": "rollout.vllm.serve_args",
}


# options that would change the rollouts, or admit others
REFUSED = {
    "--trust-remote-code": "code from a model repository is never run",
    "--kv-cache-dtype": "rollouts of a cache that rounds are lowroll's own engine's "
    "(rollout.kv.dtype)",
    "--speculative-config": "its log-probs are not known to be those of what is drawn",
    "--logprobs-mode": "a rollout has the log-probs of what was drawn from",
    "--enable-sleep-mode": "nobody would wake it",
    "--worker-extension-cls": "lowroll brings its own",
    "--middleware": "code from an option is never run",
    "--logits-processors": "code from an option is never run",
}


def _words(words: tuple[str, ...]) -> tuple[str, ...]:
    for argument in words:
        if not argument.isprintable():
            raise PydanticCustomError(
                "words", "control characters in {word}", {"word": repr(argument)}
            )
        if argument.startswith("-"):
            _check_option(argument)
    if words and not words[0].startswith("--"):
        raise PydanticCustomError("words", "begins with {word}, no option", {"word": words[0]})
    return words


def _check_option(word: str) -> None:
    if not word.startswith("--"):
        raise PydanticCustomError("words", "write {word} in its long form, --...", {"word": word})
    option = word.partition("=")[0].replace("_", "-").partition(".")[0]
    for option_name, key in FROM_RUN.items():
        if option_name == option or (len(option) > 4 and option_name.startswith(option)):
            text = f"{word} follows from {key}; leave it out here"
            raise PydanticCustomError("words", "{text}", {"text": text})
    for option_name, reason in REFUSED.items():
        if option_name == option or (len(option) > 4 and option_name.startswith(option)):
            raise PydanticCustomError("words", "{text}", {"text": f"{word} is refused: {reason}"})


def _check_url(url: str) -> str:
    try:
        url_parts = urlsplit(url)
        port = url_parts.port
    except ValueError:
        url_parts, port = urlsplit(""), None
    if url_parts.scheme == "unix" and url_parts.path and not url_parts.netloc:
        return url
    is_http = url_parts.scheme in ("http", "https") and url_parts.hostname and port != 0
    if (
        not is_http
        or url_parts.query
        or url_parts.fragment
        or url_parts.username
        or url_parts.password
    ):
        raise PydanticCustomError(
            "url", "{text}", {"text": "must be an address such as http://127.0.0.1:8000"}
        )
    return url


Url = Annotated[Text, AfterValidator(_check_url)]


class VllmConfig(Section):
    """The start of vLLM, or its address."""

    # of a running server, or unix:/path/of/its/socket; null: start one, and end it with the run
    url: Url | None = None
    token_env: Text | None = None  # environment variable with the server's token
    # interpreter with vLLM; null: LOWROLL_VLLM_PYTHON, else the run's
    python: Text | None = None
    folder: Text | None = None  # for vLLM's weights; null: a temporary folder
    devices: Text | None = None  # CUDA_VISIBLE_DEVICES, such as "1,2"; null: the run's
    tensor_parallel_size: Count = 1  # GPUs that share the model
    # share of each GPU's memory for vLLM; the learner needs the rest
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.5
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # null: the run's
    max_lora_rank: Count | None = None  # null: the least for train.lora_rank
    # transport of whole weights: by files, or from GPU to GPU where it has its own (devices)
    transfer: Literal["folder", "nccl"] = "folder"
    serve_args: Annotated[
        tuple[Text, ...], Strict(False), AfterValidator(_words)
    ] = ()  # of `vllm serve`

    @property
    def words(self) -> str:
        """Describe it: "a vLLM of its own on 2 GPUs", "vLLM at http://127.0.0.1:8000"."""
        if self.url is not None:
            return f"vLLM at {self.url}"
        gpus = self.tensor_parallel_size
        return "a vLLM of its own" + (f" on {gpus} GPUs" if gpus > 1 else "")
