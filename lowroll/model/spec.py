"""What a checkpoint's config.json says, reduced to what one decoder needs.

Supported: Qwen2/2.5, Qwen3, Llama 3.x and Mistral, dense, and Qwen3-MoE. They differ by flags
(biases, QK-norm, head size, RoPE scaling, tied embeddings, experts), not by code. Anything that
would change the computation and is not implemented is refused by the key that asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowroll.model.folder import read_json
from lowroll.types import printable

MOST = 2**31 - 1  # of any integer in a config,
LARGE = 1e30  # and of any other number: float32 has to hold it
ARCHITECTURES = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and flags of a decoder. `config` keeps the source dictionary for saving, less what it
    says of formats."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    num_experts: int = 0  # of every layer; 0: a dense MLP of `intermediate_size`
    experts_per_token: int = 0
    moe_intermediate_size: int = 0  # of one expert
    norm_topk_prob: bool = False  # the weights of a token's experts are made to sum to 1
    config: dict[str, Any] = field(repr=False, hash=False, compare=False, default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied embeddings counted once and all experts counted."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        mlp = self.num_experts * (3 * self.moe_intermediate_size + 1) or 3 * self.intermediate_size
        layer = self.hidden_size * (2 * q + 2 * kv + mlp + 2)
        layer += (q + 2 * kv) * self.qkv_bias + self.hidden_size * (self.o_bias + self.mlp_bias)
        layer += 2 * self.intermediate_size * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        heads = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + heads + self.hidden_size


def read_spec(folder: Path) -> ModelSpec:
    """The spec of a Hugging Face folder. ValueError names the file, and the key that is missing or
    unsupported."""
    config = read_config(folder)
    try:
        return spec_from_config(config)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {printable(error)}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder. ValueError names the file."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a model folder needs a config.json")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return config


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """The spec of a config dictionary. ValueError names the key."""
    if "auto_map" in config:
        raise ValueError("auto_map: the repository brings its own code, and lowroll runs none")
    architectures = config.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or architectures[0] not in ARCHITECTURES
    ):
        raise ValueError(
            f"architectures: {architectures!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    architecture = architectures[0]
    _refuse_unsupported(config)
    _refuse_active_window(config, architecture)
    experts = _experts(config) if architecture == "Qwen3MoeForCausalLM" else {}
    is_llama = architecture == "LlamaForCausalLM"
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    attention_bias = _flag(config, "attention_bias")
    theta, scaling = _rope(config)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=_integer(config, "head_dim", hidden // heads),
        norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=_integer(config, "max_position_embeddings"),
        tie_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=architecture == "Qwen2ForCausalLM"
        or (architecture != "MistralForCausalLM" and attention_bias),
        o_bias=architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
        and attention_bias,
        mlp_bias=is_llama and _flag(config, "mlp_bias"),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        eos_ids=_eos_ids(config),
        config={key: value for key, value in config.items() if key != "quantization_config"},
        **experts,
    )
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(
            f"num_key_value_heads: {spec.num_kv_heads} does not divide num_attention_heads {heads}"
        )
    if spec.head_dim % 2:
        raise ValueError(f"head_dim: {spec.head_dim} is odd; rotary embeddings need pairs")
    return spec


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """The mixture of experts of Qwen3-MoE. ValueError names the key of a kind that is not
    supported."""
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "mlp_only_layers, decoder_sparse_step: experts in every layer are supported, not in "
            "some"
        )
    count = _integer(
        config, "num_local_experts" if "num_local_experts" in config else "num_experts"
    )
    choices = _integer(config, "num_experts_per_tok")
    if choices > count:
        raise ValueError(f"num_experts_per_tok: a token cannot have {choices} of {count} experts")
    return {
        "num_experts": count,
        "experts_per_token": choices,
        "norm_topk_prob": _flag(config, "norm_topk_prob"),
        "moe_intermediate_size": _integer(config, "moe_intermediate_size"),
    }


def _integer(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise ValueError(f"{key}: expected a positive integer of at most {MOST:,}, got {value!r}")
    return value


def _positive(config: dict[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGE:
        raise ValueError(f"{key}: expected a positive number, got {value!r}")
    return float(value)


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}: expected true or false, got {value!r}")
    return bool(value)


def _eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"eos_token_id: expected token ids, got {value!r}")
    return tuple(ids)


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """Refuse every key that asks for a computation that this decoder does not do."""
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act: {config['hidden_act']!r} is not supported; supported: silu")
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        raise ValueError("is_encoder_decoder, add_cross_attention: only decoders are supported")


def _refuse_active_window(config: dict[str, Any], architecture: str) -> None:
    """Refuse sliding-window attention unless it never bites: switched off, in no layer, or as long
    as the context.

    Mistral's window is in every layer; Qwen's is behind `use_sliding_window`, in the layers that
    `layer_types` names or, without it, in those from `max_window_layers` on; Llama has none.
    """
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types: expected a list, got {kinds!r}")
    odd = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if odd:
        raise ValueError(f"layer_types: {', '.join(odd)} is not supported; only full attention is")
    used = "sliding_attention" in kinds
    if not used and architecture == "MistralForCausalLM":
        used = True
    elif (
        not used
        and not kinds
        and architecture.startswith("Qwen")
        and _flag(config, "use_sliding_window")
    ):
        first = config.get("max_window_layers")
        used = not isinstance(first, int) or first < _integer(config, "num_hidden_layers")
    if not used or (config.get("sliding_window") is None and "sliding_attention" not in kinds):
        return
    window, longest = (
        _integer(config, "sliding_window"),
        _integer(config, "max_position_embeddings"),
    )
    if window < longest:
        raise ValueError(
            f"sliding_window: a window of {window} would be active within the context of "
            f"{longest}, and sliding-window attention is not supported"
        )


def _rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling` (4)."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = config.get(key) or {}
        if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
            raise ValueError(f"{key}: expected one set of numbers for all layers, got {part!r}")
        rope |= part
    for source in (config, rope):
        if source.get("partial_rotary_factor") not in (None, 1):
            raise ValueError("partial_rotary_factor: only full rotary embeddings are supported")
    theta = _positive(rope if "rope_theta" in rope else config, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"rope_scaling: rope_type {kind!r} is not supported; supported: default, llama3"
        )
    try:
        return theta, RopeScaling(
            _positive(rope, "factor"),
            _positive(rope, "low_freq_factor"),
            _positive(rope, "high_freq_factor"),
            _integer(rope, "original_max_position_embeddings"),
        )
    except ValueError as error:
        raise ValueError(f"rope_scaling: rope_type llama3 needs numbers; {error}") from None
