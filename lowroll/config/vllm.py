"""`rollout.engine: vllm` and its section: the rollouts come from a vLLM server, which is started for
the run or runs already.

    rollout: {engine: vllm, weights: dense, vllm: {tensor_parallel_size: 2}}
    rollout: {engine: vllm, weights: dense, vllm: {url: "http://127.0.0.1:8000"}}

What lowroll's own engine does alone is refused by name, before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, Strict
from pydantic_core import PydanticCustomError

from lowroll.config.document import Path
from lowroll.config.section import Count, Positive, Problem, Section, Text

if TYPE_CHECKING:
    from lowroll.config.schema import RunConfig

EngineName = Literal["native", "vllm"]

# options of `vllm serve` that follow from the run, and the setting that they follow from
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
# options that would change what the rollouts are, or let others in
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
    for word in words:
        if not word.isprintable():
            raise PydanticCustomError("words", "control characters in {word}", {"word": repr(word)})
        if word.startswith("-"):
            _check_option(word)
    if words and not words[0].startswith("--"):
        raise PydanticCustomError("words", "begins with {word}, no option", {"word": words[0]})
    return words


def _check_option(word: str) -> None:
    if not word.startswith("--"):
        raise PydanticCustomError("words", "write {word} in its long form, --...", {"word": word})
    option = word.partition("=")[0].replace("_", "-").partition(".")[0]
    for name, key in FROM_RUN.items():
        if name == option or (len(option) > 4 and name.startswith(option)):
            text = f"{word} follows from {key}; leave it out here"
            raise PydanticCustomError("words", "{text}", {"text": text})
    for name, why in REFUSED.items():
        if name == option or (len(option) > 4 and name.startswith(option)):
            raise PydanticCustomError("words", "{text}", {"text": f"{word} is refused: {why}"})


def _url(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return url
    good = parts.scheme in ("http", "https") and parts.hostname and port != 0
    if not good or parts.query or parts.fragment or parts.username or parts.password:
        raise PydanticCustomError(
            "url", "{text}", {"text": "must be an address such as http://127.0.0.1:8000"}
        )
    return url


Url = Annotated[Text, AfterValidator(_url)]


class VllmConfig(Section):
    """The start of vLLM, or its address; read by rollout.engine: vllm alone. Times in seconds."""

    # of a server that runs already, or unix:/path/of/its/socket; null: one is started, and ended
    url: Url | None = None
    token_env: Text | None = None  # of the environment: holds the token of the server at url
    # interpreter of the environment that vLLM is installed in; null: LOWROLL_VLLM_PYTHON, else the
    # run's own
    python: Text | None = None
    folder: Text | None = None  # weights for vLLM are laid here; null: a temporary folder
    devices: Text | None = None  # its CUDA_VISIBLE_DEVICES, such as "1,2"; null: the run's own
    tensor_parallel_size: Count = 1  # GPUs that share the model
    # share of each GPU's memory that vLLM takes; the learner needs the rest
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.5
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # null: the run's
    max_lora_rank: Count | None = None  # null: the least that holds train.lora_rank
    # how all weights travel: by files, or with GPUs of its own (devices) from GPU to GPU
    transfer: Literal["folder", "nccl"] = "folder"
    serve_args: Annotated[
        tuple[Text, ...], Strict(False), AfterValidator(_words)
    ] = ()  # of `vllm serve`
    start_deadline: Positive = 600.0  # until it answers
    request_deadline: Positive = 1200.0  # until one request, or one update, is done
    max_concurrent: Count = 256  # requests under way together

    @property
    def words(self) -> str:
        """ "a vLLM of its own on 2 GPUs", "vLLM at http://127.0.0.1:8000"."""
        if self.url is not None:
            return f"vLLM at {self.url}"
        gpus = self.tensor_parallel_size
        return "a vLLM of its own" + (f" on {gpus} GPUs" if gpus > 1 else "")


_STARTED = (
    "python",
    "devices",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "dtype",
    "serve_args",
)


_TEMPERATURES = "it draws at 0.01 what is asked for below that, and takes 2 at most"


def _unheeded(temperature: float) -> bool:
    """Return whether vLLM would sample at another temperature, or not at all."""
    return 0 < temperature < 0.01 or temperature > 2


def vllm_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Yield the settings that vLLM does not support, and start options of a server that runs
    already."""
    rollout, train, drawn = cfg.rollout, cfg.train, cfg.eval
    if rollout.engine == "native":
        return
    if "weights" not in rollout.model_fields_set:
        yield (
            (("rollout", "engine"), ("rollout", "weights")),
            f"vllm needs rollout.weights beside it, whose default, {rollout.weights}, is meant for "
            "lowroll's own engine; write rollout.weights: dense, or a format",
        )
    native: tuple[tuple[Path, bool, str], ...] = (
        (("rollout", "kv"), rollout.kv is not None, "vLLM has its own KV cache"),
        (
            ("rollout", "large_batch_weights"),
            rollout.large_batch_weights is not None,
            "vLLM holds one format",
        ),
        (("rollout", "keep_dense"), rollout.keep_dense, "vLLM keeps what it wants"),
        (
            ("rollout", "release_cache"),
            rollout.release_cache,
            "vLLM keeps its cache; a smaller rollout.vllm.gpu_memory_utilization leaves the "
            "learner more",
        ),
        (
            ("rollout", "cache_tokens"),
            rollout.cache_tokens is not None,
            "vLLM's cache is what rollout.vllm.gpu_memory_utilization leaves it",
        ),
        (
            ("rollout", "turn_caching"),
            rollout.turn_caching,
            "vLLM keeps pages of drawn tokens anyway",
        ),
        (
            ("rollout", "prefill_chunk"),
            rollout.prefill_chunk is not None,
            "vLLM cuts prompts itself (rollout.vllm.serve_args: [--max-num-batched-tokens, ...])",
        ),
        (
            ("rollout", "stop"),
            bool(rollout.stop),
            "it runs without a tokenizer, and ends a response at the model's own ids",
        ),
        (
            ("rollout", "min_p"),
            rollout.min_p > 0 and rollout.top_p < 1,
            "it cuts by min_p before top_p, and lowroll after; set one of them",
        ),
        (("rollout", "temperature"), _unheeded(rollout.temperature), _TEMPERATURES),
        (("eval", "temperature"), _unheeded(drawn.temperature), _TEMPERATURES),
        (
            ("eval", "rollouts_per_example"),
            bool(drawn.interval) and drawn.temperature == 0 and drawn.rollouts_per_example > 1,
            "it draws one greedy response, and all would be equal; set eval.temperature",
        ),
        (("noise",), cfg.noise is not None, "vLLM puts none on its norms"),
        (("train", "replay_kv"), train.replay_kv, "vLLM's cache drops no keys"),
        (
            ("train", "forward"),
            train.forward == "aligned",
            "the learner can be aligned with lowroll's own arithmetic alone",
        ),
        (
            ("train", "uaq_scale"),
            train.uaq_scale is not None,
            "vLLM rolls out the model as it is, without update-aware scaling",
        ),
        (
            ("guard", "action"),
            cfg.guard is not None and cfg.guard.action == "fallback",
            "vLLM is not started anew in another format; write warn or tighten",
        ),
    )
    for path, asked, why in native:
        if asked:
            yield (path, ("rollout", "engine")), f"not with rollout.engine: vllm: {why}"
    yield from _section_problems(cfg)


def _section_problems(cfg: RunConfig) -> Iterator[Problem]:
    vllm = cfg.rollout.vllm
    attached = [name for name in _STARTED if name in vllm.model_fields_set and vllm.url is not None]
    for name in attached:
        if getattr(vllm, name) != type(vllm).model_fields[name].default:
            yield (
                (("rollout", "vllm", name), ("rollout", "vllm", "url")),
                "is for a server that lowroll starts; the one at rollout.vllm.url runs already",
            )
    if vllm.token_env is not None and vllm.url is None:
        yield (
            (("rollout", "vllm", "token_env"),),
            "is for a server at rollout.vllm.url; one that lowroll starts listens on a socket of its "
            "own, and needs none",
        )
    if vllm.transfer == "nccl" and cfg.train.lora:
        yield (
            (("rollout", "vllm", "transfer"), ("train", "lora")),
            "nccl is for all weights; an adapter travels by files",
        )
    if cfg.train.lora and vllm.max_lora_rank is not None:
        if vllm.max_lora_rank < cfg.train.lora_rank:
            yield (
                (("rollout", "vllm", "max_lora_rank"), ("train", "lora_rank")),
                f"{vllm.max_lora_rank} is less than train.lora_rank, {cfg.train.lora_rank}",
            )


def vllm_notes(engine: str, vllm: VllmConfig) -> Iterator[str]:
    """Warn of a changed section that has no effect."""
    if engine != "vllm" and vllm != VllmConfig():
        yield f"rollout.vllm: no effect, rollout.engine is {engine}"
