"""The decoder's part of a checkpoint's config.json. transformers' configuration class fills in
defaults, a family (`lowroll.model.families`) describes the rest, and an unsupported key that would
change the computation is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from lowroll.model.config_values import flag, integer, positive, token_ids
from lowroll.model.families.base import (
    FULL,
    PRE_NORMS,
    SLIDING,
    DeltaSpec,
    Family,
    LatentSpec,
    LayerSpec,
    MixtureSpec,
    Rope,
    head_dim,
    rope_of,
)
from lowroll.model.families.table import FAMILIES
from lowroll.model.files import read_object
from lowroll.types import RunFailed, printable

MOST_LAYERS = 1024
UNUSED = ("mtp.", "model.visual.")  # prefixes of tensors for drafts and for images
APART_SECONDS = 300  # of `read_spec_apart`, on a busy machine
# a class's default would be another model's
_REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_INTEGER_KEYS = (
    *_REQUIRED_KEYS,
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
)
_FLAG_KEYS = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "norm_topk_prob",
)
_NUMBER_KEYS = (  # of older files
    "sliding_window_pattern",
    "rope_local_base_freq",
    "full_attention_interval",
)
_LAYER_LISTS = ("layer_types", "no_rope_layers")
_NOT_SAVED = ("quantization_config", "auto_map")  # formats, and code that no folder has
_OTHER_KEYS = (
    "rms_norm_eps",
    "hidden_act",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "sliding_window",
    "max_window_layers",
    "layer_types",
    "decoder_sparse_step",
    "mlp_only_layers",
)


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and flags of a decoder. `config` is the source, for saving, without formats."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    tie_embeddings: bool
    eos_ids: tuple[int, ...]
    ropes: tuple[Rope, ...]
    layers: tuple[LayerSpec, ...] = ()  # empty: all as `LayerSpec()`
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""  # `head`: of each head of q and k; `whole`: of all heads together
    fused: tuple[str, ...] = ()  # `qkv`, `gate_up`: matrices that checkpoints hold as one
    norms: tuple[tuple[str, str], ...] = PRE_NORMS  # attribute, name in checkpoints
    norm_offset: float = 0.0  # added to the norms' weights
    activation: str = "silu"  # or `gelu_tanh`
    attention_gate: bool = False  # q_proj also makes a gate of attention's output
    attention_sinks: bool = False  # see `model.attention`
    delta: DeltaSpec | None = None
    latent: LatentSpec | None = None  # latent attention in all layers
    embedding_scale: float = 1.0
    query_scale: float = 1.0  # beside 1 / sqrt(head_dim)
    update_scale: float = 1.0  # of the updates by attention and MLP
    hidden_scale: float = 1.0  # of the last hidden states
    mixture: MixtureSpec = MixtureSpec()
    # prefixes of all tensors in the source folder, and of those not read
    stored_prefix: str = field(default="model.", compare=False)
    unused: tuple[str, ...] = field(default=(), compare=False)
    stored_stacked: bool = field(default=False, compare=False)
    config: dict[str, Any] = field(repr=False, hash=False, compare=False, default_factory=dict)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer, 0 for none; empty if all are 0."""
        windows = tuple(layer.window for layer in self.layers)
        return windows if any(windows) else ()

    @property
    def layers_with_keys(self) -> tuple[bool, ...]:
        """Per layer, whether it attends to keys; the others have a state."""
        if not self.layers:
            return (True,) * self.num_layers
        return tuple(layer.mixer == "attention" for layer in self.layers)

    def has_experts(self, layer: int) -> bool:
        return self.mixture.num_experts > 0 and layer >= self.mixture.dense_layers

    @property
    def layers_with_experts(self) -> int:
        return self.num_layers - self.mixture.dense_layers if self.mixture.num_experts else 0

    @property
    def adds_plainly(self) -> bool:
        """True if a block computes x + f(norm(x)), as calibration assumes."""
        others = (self.delta, self.latent)
        return self.norms == PRE_NORMS and self.update_scale == 1.0 and others == (None, None)

    @property
    def num_parameters(self) -> int:
        """Parameters, with all experts, and tied embeddings once."""
        norms = (self.num_layers * len(self.norms) + 1) * self.hidden_size
        num_delta = sum(layer.mixer == "delta" for layer in self.layers)
        delta = 0 if self.delta is None else self.delta.num_parameters(self.hidden_size)
        mixers = num_delta * delta + (self.num_layers - num_delta) * self._attention
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return norms + mixers + self._mlps + embeddings

    @property
    def _attention(self) -> int:
        if self.latent is not None:
            return self.latent.num_parameters(self.num_heads, self.hidden_size)
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = q * (1 + self.attention_gate) + 2 * kv
        head_norms = {"": 0, "head": 2 * self.head_dim, "whole": q + kv}[self.qk_norm]
        sinks = self.num_heads * self.attention_sinks
        matrices = self.hidden_size * (qkv + q)
        return matrices + qkv * self.qkv_bias + self.hidden_size * self.o_bias + head_norms + sinks

    @property
    def _mlps(self) -> int:
        dense = self.hidden_size * (3 * self.intermediate_size + self.mlp_bias)
        dense += 2 * self.intermediate_size * self.mlp_bias
        num_mixtures = self.layers_with_experts
        mixtures = num_mixtures * self.mixture.num_parameters(self.hidden_size)
        return mixtures + (self.num_layers - num_mixtures) * dense


def read_spec(folder: Path) -> ModelSpec:
    """Read the spec of a Hugging Face folder, with all its eos ids. ValueError names the file and
    the key."""
    config = read_config(folder)
    try:
        spec = spec_from_config(config)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {printable(error)}") from None
    return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *generation_eos_ids(folder)))))


def read_spec_apart(folder: Path) -> ModelSpec:
    """Run `read_spec` in a subprocess, as transformers' configurations import torch, which an
    orchestrator must not load. RunFailed on a timeout."""
    command = [sys.executable, "-c", _READ_SPEC_PROGRAM, str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=APART_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{folder}: its config.json is not read after {APART_SECONDS} s") from None
    if result.returncode:
        raise RunFailed(
            f"{folder}: its config.json was not read: {printable(result.stderr[-500:])}"
        )
    try:
        return msgspec.json.decode(result.stdout, type=ModelSpec)
    except msgspec.ValidationError:
        raise ValueError(json.loads(result.stdout)["error"]) from None


_READ_SPEC_PROGRAM = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from lowroll.model.spec import read_spec
sys.modules["torch"] = None
try:
    print(json.dumps(asdict(read_spec(Path(sys.argv[1])))))
except ValueError as error:
    print(json.dumps({"error": str(error)}))
"""


def generation_eos_ids(folder: Path) -> tuple[int, ...]:
    """Return the eos ids of generation_config.json. ValueError names the file."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    config = read_object(path)
    try:
        return token_ids(config, "eos_token_id")
    except ValueError as error:
        raise ValueError(f"{path}: {printable(error)}") from None


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a model folder needs a config.json")
    return read_object(path)


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a config dictionary. ValueError names the key."""
    config, prefix = _text_part(config)
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        raise ValueError("is_encoder_decoder, add_cross_attention: only decoders are supported")
    family = _family(config)
    if "auto_map" in config and not family.brings_code:
        raise ValueError("auto_map: the repository brings its own code, and lowroll runs none")
    values = _parse_with_transformers(config, family)
    activation = values[family.activation_key]
    if activation != family.activation:
        raise ValueError(
            f"{family.activation_key}: {activation!r} is not supported; supported: "
            f"{family.activation}"
        )
    described = family.describe(values)
    latent = described.get("latent")
    if "ropes" not in described:
        described["ropes"] = (rope_of(values),)
    spec = ModelSpec(
        architecture=family.architecture,
        vocab_size=integer(values, "vocab_size"),
        hidden_size=integer(values, "hidden_size"),
        intermediate_size=integer(values, "intermediate_size", values.get("moe_intermediate_size")),
        num_layers=integer(values, "num_hidden_layers"),
        num_heads=integer(values, "num_attention_heads"),
        num_kv_heads=integer(values, "num_key_value_heads", integer(values, "num_attention_heads")),
        head_dim=latent.head_dim if latent is not None else head_dim(values),
        norm_eps=positive(values, "rms_norm_eps"),
        max_position=integer(values, "max_position_embeddings"),
        tie_embeddings=flag(values, "tie_word_embeddings"),
        eos_ids=token_ids(config, "eos_token_id"),
        stored_prefix=prefix,
        unused=(*UNUSED, *described.pop("unused", ())),
        config={key: value for key, value in config.items() if key not in _NOT_SAVED},
        **described,
    )
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(
            f"num_key_value_heads: {spec.num_kv_heads} does not divide num_attention_heads "
            f"{spec.num_heads}"
        )
    if spec.head_dim % 2:
        raise ValueError(f"head_dim: {spec.head_dim} is odd; rotary embeddings need pairs")
    return spec


def _text_part(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    architectures = config.get("architectures")
    whole = (config.get("model_type"), *(architectures if isinstance(architectures, list) else ()))
    family = next((f for f in FAMILIES.values() if f.inside and f.inside == whole), None)
    if family is None:
        return config, "model."
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"text_config: expected an object, got {text!r}")
    keys = ("tie_word_embeddings", "eos_token_id", "quantization_config", "dtype", "torch_dtype")
    of_whole = {key: config[key] for key in keys if key in config}
    names = {"model_type": family.model_type, "architectures": [family.architecture]}
    return {**text, **of_whole, **names}, "model.language_model."


def _family(config: dict[str, Any]) -> Family:
    by_architecture = {family.architecture: family for family in FAMILIES.values()}
    architectures = config.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or not isinstance(architectures[0], str)
        or architectures[0] not in by_architecture
    ):
        raise ValueError(
            f"architectures: {architectures!r} is not supported; supported: {', '.join(by_architecture)}"
        )
    model_type = config.get("model_type", by_architecture[architectures[0]].model_type)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type: {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    if family.architecture != architectures[0]:
        raise ValueError(
            f"architectures: {architectures[0]} is no model of model_type {model_type!r}"
        )
    return family


def _parse_with_transformers(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the attributes of transformers' configuration. Sizes are checked first, as the class
    lists all layers."""
    for key in _INTEGER_KEYS:
        is_required = key in _REQUIRED_KEYS and key not in family.lacks
        if is_required or config.get(key) is not None:
            integer(config, key)
    for key in _FLAG_KEYS:
        flag(config, key)
    for key in _NUMBER_KEYS:
        if key in config:
            positive(config, key)
    if config["num_hidden_layers"] > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers: {MOST_LAYERS} at most")
    for key in ("rope_scaling", "rope_parameters"):
        _check_rope(key, {} if config.get(key) is None else config[key])
    for key in _LAYER_LISTS:
        value = config.get(key)
        if value is not None and (
            not isinstance(value, list) or len(value) != config["num_hidden_layers"]
        ):
            raise ValueError(f"{key}: expected a list with a value for each layer, got {value!r}")
    keys = (*_INTEGER_KEYS, *_FLAG_KEYS, *_OTHER_KEYS, *family.keys)
    known_values = {key: config[key] for key in keys if key in config}
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        parsed = CONFIG_MAPPING[family.model_type].from_dict(deepcopy(known_values))
        parsed.standardize_rope_params()  # again, as transformers' models do: extra keys count now
        return vars(parsed)
    except Exception as error:  # of the class, and Python's for odd values
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(
            f"not a configuration of {family.model_type}: {' '.join(lines)[:300]}"
        ) from None


def _check_rope(key: str, rope: Any) -> None:
    by_type = isinstance(rope, dict) and set(rope) <= {FULL, SLIDING}
    sets = list(rope.values()) if by_type else [rope]
    for numbers in sets:
        if not isinstance(numbers, dict) or any(isinstance(v, dict) for v in numbers.values()):
            raise ValueError(f"{key}: expected one set of numbers for all layers, got {rope!r}")
