"""The settings that an engine does not support together. The model and the machine are checked when
a run starts (`model.exact`)."""

from __future__ import annotations

from collections.abc import Iterator

from lowroll.config.document import Path
from lowroll.config.schema import RunSettings
from lowroll.config.section import Problem
from lowroll.quant.format_budget import is_budget
from lowroll.quant.table import STORED


def layer_format_problems(
    weights: str, engine: str, large_batch_weights: str | None
) -> Iterator[Problem]:
    """Yield the settings that do not go with a format for each layer, which a budget chooses or the
    model's folder has stored."""
    formats_differ_by_layer = is_budget(weights) or weights == STORED
    if not formats_differ_by_layer:
        return
    weights_key = ("rollout", "weights")
    if engine != "native":
        yield (
            (weights_key, ("rollout", "engine")),
            "each layer may have a format of its own, which only `engine: native` can have; with "
            f"{engine} write one format",
        )
    if large_batch_weights is not None:
        yield (
            (weights_key, ("rollout", "large_batch_weights")),
            "each layer may have a format of its own, which leaves no place for a second one; write "
            "one format, or large_batch_weights: null",
        )


Bar = tuple[str, bool, str]  # a setting, whether it is in the way, and the required value


def exact_problems(cfg: RunSettings) -> Iterator[Problem]:
    """Yield settings under which exact rollouts and learner cannot have the same bits."""
    if not cfg.rollout.exact:
        return
    for key, is_in_way, required in (*bars_engine(cfg), *_learner_bars(cfg)):
        if is_in_way:
            yield (("rollout", "exact"), tuple(key.split("."))), f"it needs {key} {required}"


def bars_engine(cfg: RunSettings) -> tuple[Bar, ...]:
    """Return the settings under which an engine gives a request the same bits in any batch."""
    rollout = cfg.rollout
    has_lossy_cache = rollout.cache.policy != "dense" or rollout.cache.kv_dtype is not None
    has_second_format = rollout.large_batch_weights is not None
    return (
        ("rollout.engine", rollout.engine != "native", "native: vLLM's kernels are others"),
        ("rollout.kv", has_lossy_cache, "null: every key, unrounded"),
        ("rollout.large_batch_weights", has_second_format, "null: one format"),
    )


def _learner_bars(cfg: RunSettings) -> tuple[Bar, ...]:
    train = cfg.train
    has_unshared_noise = cfg.noise is not None and cfg.noise.learner == "clean"
    return (
        ("train.forward", train.forward not in ("dense", "aligned"), "aligned, as it will be"),
        ("train.replay_kv", train.replay_kv, "false: no key is dropped"),
        ("noise", has_unshared_noise, "null, or noise.learner: shared"),
        ("dtype", cfg.dtype == "bfloat16" and cfg.device == "cpu", "float32 on a CPU"),
    )


_TEMPERATURE_LIMITS = "it draws at 0.01 what is asked for below that, and takes 2 at most"


def vllm_problems(cfg: RunSettings) -> Iterator[Problem]:
    """Yield the settings that vLLM does not support, and start options of a running server."""
    rollout, train, eval_cfg = cfg.rollout, cfg.train, cfg.eval
    if rollout.engine == "native":
        return
    if "weights" not in rollout.model_fields_set:
        yield (
            (("rollout", "engine"), ("rollout", "weights")),
            f"vllm needs rollout.weights beside it, whose default, {rollout.weights}, is meant for "
            "lowroll's own engine; write rollout.weights: dense, or a format",
        )
    native_only: tuple[tuple[Path, bool, str], ...] = (
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
        (
            ("rollout", "temperature"),
            _vllm_changes_temperature(rollout.temperature),
            _TEMPERATURE_LIMITS,
        ),
        (
            ("eval", "temperature"),
            _vllm_changes_temperature(eval_cfg.temperature),
            _TEMPERATURE_LIMITS,
        ),
        (
            ("eval", "rollouts_per_example"),
            bool(eval_cfg.interval)
            and eval_cfg.temperature == 0
            and eval_cfg.rollouts_per_example > 1,
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
    for path, is_set, reason in native_only:
        if is_set:
            yield (path, ("rollout", "engine")), f"not with rollout.engine: vllm: {reason}"
    yield from _vllm_section_problems(cfg)


def _vllm_changes_temperature(temperature: float) -> bool:
    return 0 < temperature < 0.01 or temperature > 2


_START_OPTIONS = (
    "python",
    "devices",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "dtype",
    "serve_args",
)


def _vllm_section_problems(cfg: RunSettings) -> Iterator[Problem]:
    vllm = cfg.rollout.vllm
    start_options = [
        name for name in _START_OPTIONS if name in vllm.model_fields_set and vllm.url is not None
    ]
    for name in start_options:
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
