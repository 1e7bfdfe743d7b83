"""Descriptions of model families. The defaults are Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple

from lowroll.model.config_values import flag, integer, layer_list, positive

Values = Mapping[str, Any]  # attributes of transformers' configuration
# a block's norms: attribute and name in checkpoints, in their order
PRE_NORMS = (
    ("input_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
)
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class RopeScaling:
    """A change of the frequencies for long contexts. kind: `linear`, `llama3` or `yarn`. low and
    high: llama3's frequency factors, YaRN's `beta_slow` and `beta_fast`. magnitude: factor of cos
    and sin. truncate: YaRN's borders are whole pairs."""

    kind: str
    factor: float
    original_max_position: int = 0
    low: float = 0.0
    high: float = 0.0
    magnitude: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Rope:
    """Rotary positions. theta: the base. dims: rotated numbers of a head. interleaved: pairs are
    neighbours (2i, 2i + 1), not halves (i, i + dims / 2)."""

    theta: float
    dims: int
    scaling: RopeScaling | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """The differences between layers. rope: an index into the spec's `ropes`; None: no positions.
    window: the last keys that a query sees, itself included; 0: all."""

    rope: int | None = 0
    window: int = 0
    mixer: str = "attention"  # or `delta`: a gated delta net


@dataclass(frozen=True)
class DeltaSpec:
    """The sizes of gated delta nets. A key head serves consecutive value heads. taps: of the
    convolution. grouped: checkpoints group q, k, v and z, and b and a, by key head (Qwen3-Next)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    grouped: bool = False

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_key_heads: {self.key_heads} does not divide linear_num_value_heads "
                f"{self.value_heads}"
            )

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def input_parts(self) -> dict[str, int]:
        """Return the rows of the matrices of q, k, v and z, by name."""
        if self.grouped:
            return {"in_proj_qkvz": self.channels + self.values}
        return {"in_proj_qkv": self.channels, "in_proj_z": self.values}

    @property
    def rate_parts(self) -> dict[str, int]:
        """Return the rows of the matrices of b and a."""
        if self.grouped:
            return {"in_proj_ba": 2 * self.value_heads}
        return {"in_proj_b": self.value_heads, "in_proj_a": self.value_heads}

    def num_parameters(self, hidden_size: int) -> int:
        matrices = self.channels + 2 * self.values + 2 * self.value_heads
        vectors = self.channels * self.taps + 2 * self.value_heads + self.value_dim
        return hidden_size * matrices + vectors


@dataclass(frozen=True)
class LatentSpec:
    """The sizes of multi-head latent attention. query_rank, kv_rank: of the latents; query_rank 0:
    queries have none. A head of q and k has nope_dim numbers, then rope_dim rotated ones."""

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def matrices(self, heads: int, hidden_size: int) -> dict[str, tuple[dict[str, int], int]]:
        """Return (rows of the stacked matrices by name in checkpoints, in features) of each linear
        layer."""
        queries, latents = heads * self.head_dim, self.kv_rank + self.rope_dim
        low_rank = {"q_a_proj": self.query_rank} if self.query_rank else {"q_proj": queries}
        q_b = {"q_b": ({"q_b_proj": queries}, self.query_rank)} if self.query_rank else {}
        keys_and_values = heads * (self.nope_dim + self.value_dim)
        return {
            "qkv_a": ({**low_rank, "kv_a_proj_with_mqa": latents}, hidden_size),
            **q_b,
            "kv_b": ({"kv_b_proj": keys_and_values}, self.kv_rank),
            "o": ({"o_proj": hidden_size}, heads * self.value_dim),
        }

    def in_features(self, heads: int, hidden_size: int) -> dict[str, int]:
        matrices = self.matrices(heads, hidden_size).values()
        return {part: features for parts, features in matrices for part in parts}

    def num_parameters(self, heads: int, hidden_size: int) -> int:
        matrices = self.matrices(heads, hidden_size).values()
        norms = self.query_rank + self.kv_rank
        return norms + sum(sum(parts.values()) * features for parts, features in matrices)


class ClampedGate(NamedTuple):
    """The constants of `kernels.fused.swiglu.clamped_swiglu`."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class SigmoidScores:
    """A router with sigmoid scores. A correction of each expert is added for the choice alone.
    Experts are chosen from the `groups_kept` best groups. scale: of the chosen weights."""

    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class MixtureSpec:
    """The experts that replace the dense MLP, if any.

    dense_layers: the first layers, which keep a dense MLP. expert_size: intermediate size.
    shared_size: that of an expert that takes every token, 0 without. renormalize: a token's weights
    sum to 1. scores: None: a softmax over all experts. has_biases: of the router and all experts.
    clamped_gate: None for plain SwiGLU. stacked: saved folders hold a layer's experts as one tensor
    (`model.stacked`).
    """

    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    dense_layers: int = 0
    shared_size: int = 0
    shared_gate: bool = True
    renormalize: bool = False
    scores: SigmoidScores | None = None
    has_biases: bool = False
    clamped_gate: ClampedGate | None = None
    stacked: bool = False

    @property
    def gates_shared(self) -> bool:
        return self.shared_size > 0 and self.shared_gate

    def num_parameters(self, hidden_size: int) -> int:
        shared = 3 * self.shared_size + self.gates_shared
        features = self.num_experts * (3 * self.expert_size + 1) + shared
        biases = 1 + 2 * self.expert_size + hidden_size
        vectors = (self.scores is not None) + biases * self.has_biases
        return hidden_size * features + self.num_experts * vectors


@dataclass(frozen=True)
class Family:
    """A row of the table of families.

    model_type, architecture: as in config.json. describe: returns the fields of `ModelSpec` that
    differ from Llama's. keys: read beside the common ones. activation_key, activation: the key of
    the MLP's activation, and the supported one. inside: model type and architecture of a model of
    images and text with this `text_config`. lacks: required keys that it does not have.
    brings_code: transformers' computation replaces the code of published folders.
    """

    model_type: str
    architecture: str
    describe: Callable[[Values], dict[str, Any]]
    keys: tuple[str, ...] = ()
    activation_key: str = "hidden_act"
    activation: str = "silu"
    inside: tuple[str, str] | None = None
    lacks: tuple[str, ...] = ()
    brings_code: bool = False


def head_dim(values: Values) -> int:
    return integer(
        values,
        "head_dim",
        integer(values, "hidden_size") // integer(values, "num_attention_heads"),
    )


def rope_of(
    values: Values, rope: Values | None = None, partial: bool = False, interleaved: bool = False
) -> Rope:
    """Return the rotary positions of `rope_parameters`, or those given. partial: heads may be
    rotated in part. ValueError for an unsupported rope_type."""
    rope = values["rope_parameters"] if rope is None else rope
    if not isinstance(rope, Mapping) or "rope_type" not in rope:
        raise ValueError(
            f"rope_parameters: expected one set of numbers for all layers, got {rope!r}"
        )
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if not partial and share not in (None, 1):
        raise ValueError("partial_rotary_factor: the family rotates whole heads")
    dims = int(
        head_dim(values)
        * positive({"partial_rotary_factor": share or 1.0}, "partial_rotary_factor")
    )
    if dims > head_dim(values) or dims < 2 or dims % 2:
        raise ValueError(f"partial_rotary_factor: {share} of a head is no even number of numbers")
    return Rope(positive(rope, "rope_theta"), dims, _scaling(values, rope), interleaved)


def _scaling(values: Values, rope: Values) -> RopeScaling | None:
    kind = rope["rope_type"]
    if kind == "default":
        return None
    try:
        if kind == "linear":
            return RopeScaling(kind, positive(rope, "factor"))
        if kind == "llama3":
            return RopeScaling(
                kind,
                factor=positive(rope, "factor"),
                original_max_position=integer(rope, "original_max_position_embeddings"),
                low=positive(rope, "low_freq_factor"),
                high=positive(rope, "high_freq_factor"),
            )
        if kind == "yarn":
            return _yarn(values, rope)
    except ValueError as error:
        raise ValueError(f"rope_scaling: rope_type {kind} needs numbers; {error}") from None
    raise ValueError(
        f"rope_scaling: rope_type {kind!r} is not supported; supported: default, linear, llama3, yarn"
    )


def yarn_magnitude(scale: float, weight: float = 1.0) -> float:
    """Return YaRN's factor of cos and sin for `scale` times the context."""
    return 1.0 if scale <= 1 else 0.1 * weight * log(scale) + 1.0


def _yarn(values: Values, rope: Values) -> RopeScaling:
    """Return YaRN's scaling (Peng et al. 2023, arXiv 2309.00071), read as transformers reads it."""
    original = integer(
        rope, "original_max_position_embeddings", integer(values, "max_position_embeddings")
    )
    factor = positive(rope, "factor", integer(values, "max_position_embeddings") / original)
    if rope.get("attention_factor") is not None:
        attention_factor = positive(rope, "attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator = yarn_magnitude(factor, positive(rope, "mscale"))
        attention_factor = numerator / yarn_magnitude(factor, positive(rope, "mscale_all_dim"))
    else:
        attention_factor = yarn_magnitude(factor)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_max_position=original,
        low=positive(rope, "beta_slow", 1.0),
        high=positive(rope, "beta_fast", 32.0),
        magnitude=attention_factor,
        truncate=rope.get("truncate") is not False,
    )


def ropes_by_type(values: Values) -> tuple[Rope, Rope]:
    ropes = values["rope_parameters"]
    if not isinstance(ropes, Mapping) or not {FULL, SLIDING} <= set(ropes):
        raise ValueError(f"rope_parameters: expected those of {FULL} and {SLIDING}, got {ropes!r}")
    return rope_of(values, ropes[FULL]), rope_of(values, ropes[SLIDING])


def windowed(values: Values, sliding: list[bool]) -> tuple[LayerSpec, ...]:
    """Return layers, some with `sliding_window`, unless it spans the context."""
    if not any(sliding):
        return ()
    window = integer(values, "sliding_window")
    if window >= integer(values, "max_position_embeddings"):
        return ()
    return tuple(LayerSpec(window=window if is_sliding else 0) for is_sliding in sliding)


def sliding_ropes(values: Values) -> dict[str, Any]:
    """Return the layers and the positions: of full layers, then of sliding ones."""
    sliding = sliding_layers(values)
    windows = windowed(values, sliding) or (LayerSpec(),) * len(sliding)
    return {
        "ropes": ropes_by_type(values),
        "layers": tuple(
            LayerSpec(int(is_sliding), layer.window)
            for is_sliding, layer in zip(sliding, windows, strict=True)
        ),
    }


def same_window(values: Values) -> tuple[LayerSpec, ...]:
    has_window = values.get("sliding_window") is not None
    return windowed(values, [has_window] * integer(values, "num_hidden_layers"))


def sliding_layers(values: Values) -> list[bool]:
    layers = integer(values, "num_hidden_layers")
    kinds = layer_list(values, "layer_types", {FULL, SLIDING}, layers)
    return [kind == SLIDING for kind in kinds]


def biases(values: Values) -> dict[str, Any]:
    has_biases = flag(values, "attention_bias")
    return {"qkv_bias": has_biases, "o_bias": has_biases}
