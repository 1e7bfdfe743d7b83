"""What a checkpoint's config.json says, reduced to what one dense decoder needs.

Supported: Qwen2/2.5, Qwen3, Llama 3.x and Mistral dense. They differ by flags (biases, QK-norm, head size, RoPE
scaling, tied embeddings), not by code. Anything that would change the computation and is not implemented is refused
by the key that asks for it.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and flags of a decoder. `config` keeps the source dictionary for saving."""

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
    config: dict[str, Any] = field(repr=False, hash=False, compare=False, default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """Parameters of the dense model, tied embeddings counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size + 2)
        layer += (q + 2 * kv) * self.qkv_bias + self.hidden_size * (self.o_bias + self.mlp_bias)
        layer += 2 * self.intermediate_size * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        heads = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + heads + self.hidden_size


def read_spec(folder: Path) -> ModelSpec:
    """The spec of a Hugging Face folder. ValueError names the file, and the key that is missing or unsupported."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a model folder needs a config.json")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object")
    try:
        return spec_from_config(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """The spec of a config dictionary. ValueError names the key."""
    if "auto_map" in config:
        raise ValueError("auto_map: the repository brings its own code, and lowroll runs none")
    architectures = config.get("architectures") or [None]
    architecture = architectures[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architectures: {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    _refuse_unsupported(config, architecture)
    is_llama = architecture == "LlamaForCausalLM"
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    attention_bias = bool(config.get("attention_bias", False))
    theta, scaling = _rope(config)
    eos = config.get("eos_token_id")
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=_integer(config, "head_dim", hidden // heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=_integer(config, "max_position_embeddings"),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or (architecture != "MistralForCausalLM" and attention_bias),
        o_bias=architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and attention_bias,
        mlp_bias=is_llama and bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
        config=dict(config),
    )
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(f"num_key_value_heads: {spec.num_kv_heads} does not divide num_attention_heads {heads}")
    if spec.head_dim % 2:
        raise ValueError(f"head_dim: {spec.head_dim} is odd; rotary embeddings need pairs")
    return spec


def _integer(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: expected a positive integer, got {value!r}")
    return value


def _refuse_unsupported(config: dict[str, Any], architecture: str) -> None:
    """Refuse every key that asks for a computation that this decoder does not do."""
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act: {config['hidden_act']!r} is not supported; supported: silu")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: only full rotary embeddings are supported")
    if config.get("quantization_config"):
        raise ValueError("quantization_config: quantised checkpoints are not read yet; load the dense one")
    layer_types = config.get("layer_types") or []
    odd = sorted({str(kind) for kind in layer_types} - {"full_attention"})
    if odd:
        raise ValueError(f"layer_types: {', '.join(odd)} is not supported; only full attention is")
    window = config.get("sliding_window")
    used = config.get("use_sliding_window", architecture == "MistralForCausalLM")
    longest = config.get("max_position_embeddings")
    if used and window is not None and (longest is None or window < longest):
        raise ValueError(f"sliding_window: a window of {window} would be active within the context of {longest}, "
                         "and sliding-window attention is not supported")


def _rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_scaling: rope_type {kind!r} is not supported; supported: default, llama3")
    try:
        return theta, RopeScaling(float(rope["factor"]), float(rope["low_freq_factor"]),
                                  float(rope["high_freq_factor"]), int(rope["original_max_position_embeddings"]))
    except KeyError as error:
        raise ValueError(f"rope_scaling: rope_type llama3 needs the key {error}") from None
