"""The decoder's part of a checkpoint's config.json.

Supported: Qwen2/2.5, Qwen3, Llama 3.x and Mistral, dense, and Qwen3-MoE. They differ by flags, not
by code. transformers' configuration class of the `model_type` reads the file and fills in defaults.
A key that would change the computation and is not implemented is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from lowroll.model.files import read_json
from lowroll.types import RunFailed, printable

MOST = 2**31 - 1  # of any integer in a config
LARGE = 1e30  # of any other number: must fit float32
MOST_LAYERS = 1024
APART_SECONDS = 300  # of `read_spec_apart`, on a busy machine
# model_type: the checkpoint's architecture, and transformers' config class
FAMILIES = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "mistral": ("MistralForCausalLM", "MistralConfig"),
}
# required keys: a class's default would be another model's
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
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and flags of a decoder. `config` keeps the source dictionary for saving, without
    formats."""

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
    norm_topk_prob: bool = False  # normalize a token's expert weights to sum to 1
    config: dict[str, Any] = field(repr=False, hash=False, compare=False, default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """Parameters, with tied embeddings counted once and all experts."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        mlp = self.num_experts * (3 * self.moe_intermediate_size + 1) or 3 * self.intermediate_size
        layer = self.hidden_size * (2 * q + 2 * kv + mlp + 2)
        layer += (q + 2 * kv) * self.qkv_bias + self.hidden_size * (self.o_bias + self.mlp_bias)
        layer += 2 * self.intermediate_size * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        heads = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + heads + self.hidden_size


def read_spec(folder: Path) -> ModelSpec:
    """Read the spec of a Hugging Face folder, with the eos ids of generation_config.json.
    ValueError names the file, and the missing or unsupported key."""
    config = read_config(folder)
    try:
        spec = spec_from_config(config)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {printable(error)}") from None
    return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *generation_eos_ids(folder)))))


def read_spec_apart(folder: Path) -> ModelSpec:
    """Run `read_spec` in a subprocess: transformers' configurations import torch, which an
    orchestrator must not load. The errors are the same; RunFailed on a timeout."""
    command = [sys.executable, "-c", _READ_SPEC_PROGRAM, str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=APART_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{folder}: its config.json is not read after {APART_SECONDS} s") from None
    if result.returncode:
        raise RunFailed(
            f"{folder}: its config.json was not read: {printable(result.stderr[-500:])}"
        )
    reply = json.loads(result.stdout)
    if "error" in reply:
        raise ValueError(reply["error"])
    scaling = reply.pop("rope_scaling")
    return ModelSpec(
        **{**reply, "eos_ids": tuple(reply["eos_ids"])},
        rope_scaling=None if scaling is None else RopeScaling(**scaling),
    )


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
    """Return the eos ids of generation_config.json, if any. ValueError names the file."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object")
    try:
        return _eos_ids(config)
    except ValueError as error:
        raise ValueError(f"{path}: {printable(error)}") from None


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a model folder needs a config.json")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return config


def spec_from_config(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a config dictionary. ValueError names the key."""
    if "auto_map" in config:
        raise ValueError("auto_map: the repository brings its own code, and lowroll runs none")
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        raise ValueError("is_encoder_decoder, add_cross_attention: only decoders are supported")
    family = _family(config)
    hf_config = _parse_with_transformers(config, family)
    values = vars(hf_config)  # the class's attributes, and the file's own
    if values["hidden_act"] != "silu":
        raise ValueError(f"hidden_act: {values['hidden_act']!r} is not supported; supported: silu")
    _refuse_active_window(values, family)
    architecture = FAMILIES[family][0]
    hidden, heads = _integer(values, "hidden_size"), _integer(values, "num_attention_heads")
    biases = family != "mistral" and _flag(values, "attention_bias")
    theta, scaling = _rope_settings(values)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=_integer(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(values, "intermediate_size"),
        num_layers=_integer(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(values, "num_key_value_heads", heads),
        head_dim=_integer(values, "head_dim", hidden // heads),
        norm_eps=_positive(values, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=_integer(values, "max_position_embeddings"),
        tie_embeddings=_flag(values, "tie_word_embeddings"),
        qkv_bias=family == "qwen2" or biases,
        o_bias=family != "qwen2" and biases,
        mlp_bias=family == "llama" and _flag(values, "mlp_bias"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        eos_ids=_eos_ids(config),
        config={key: value for key, value in config.items() if key != "quantization_config"},
        **(_expert_settings(values) if family == "qwen3_moe" else {}),
    )
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(
            f"num_key_value_heads: {spec.num_kv_heads} does not divide num_attention_heads {heads}"
        )
    if spec.head_dim % 2:
        raise ValueError(f"head_dim: {spec.head_dim} is odd; rotary embeddings need pairs")
    return spec


def _family(config: dict[str, Any]) -> str:
    """Return a config's model_type. ValueError if unsupported, or if `architectures` names another
    model, such as a classifier."""
    family_by_architecture = {
        architecture: family for family, (architecture, _) in FAMILIES.items()
    }
    architectures = config.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or not isinstance(architectures[0], str)
        or architectures[0] not in family_by_architecture
    ):
        raise ValueError(
            f"architectures: {architectures!r} is not supported; supported: {', '.join(family_by_architecture)}"
        )
    family = config.get("model_type", family_by_architecture[architectures[0]])
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"model_type: {family!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    if FAMILIES[family][0] != architectures[0]:
        raise ValueError(f"architectures: {architectures[0]} is no model of model_type {family!r}")
    return family


def _parse_with_transformers(config: dict[str, Any], family: str) -> Any:
    """Return transformers' configuration. ValueError names the key.

    Types and sizes are checked first: the class builds a list of all layers.
    """
    for key in _INTEGER_KEYS:
        if key in _REQUIRED_KEYS or config.get(key) is not None:
            _integer(config, key)
    for key in _FLAG_KEYS:
        _flag(config, key)
    if config["num_hidden_layers"] > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers: {MOST_LAYERS} at most")
    for key in ("rope_scaling", "rope_parameters"):
        rope_values = config.get(key) or {}
        if not isinstance(rope_values, dict) or any(
            isinstance(value, dict) for value in rope_values.values()
        ):
            raise ValueError(
                f"{key}: expected one set of numbers for all layers, got {rope_values!r}"
            )
    known_values = {
        key: config[key] for key in (*_INTEGER_KEYS, *_FLAG_KEYS, *_OTHER_KEYS) if key in config
    }
    module = import_module(f"transformers.models.{family}.configuration_{family}")
    try:
        parsed = getattr(module, FAMILIES[family][1]).from_dict(deepcopy(known_values))
        parsed.standardize_rope_params()  # again, as transformers' models do: extra keys count now
        return parsed
    except Exception as error:  # the class's own errors, and Python's for odd values
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"not a configuration of {family}: {' '.join(lines)[:300]}") from None


def _expert_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the spec's fields of a mixture of experts."""
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
    """Return a positive integer of the config. ValueError names the key."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise ValueError(f"{key}: expected a positive integer of at most {MOST:,}, got {value!r}")
    return value


def _positive(config: dict[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive number of the config. ValueError names the key."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGE:
        raise ValueError(f"{key}: expected a positive number, got {value!r}")
    return float(value)


def _flag(config: dict[str, Any], key: str) -> bool:
    """Return a boolean of the config. ValueError names the key."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}: expected true or false, got {value!r}")
    return bool(value)


def _eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the config's end-of-sequence ids."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(
        isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0
        for token_id in ids
    ):
        raise ValueError(f"eos_token_id: expected token ids, got {value!r}")
    return tuple(ids)


def _refuse_active_window(config: dict[str, Any], family: str) -> None:
    """Refuse sliding-window attention unless it has no effect: off, in no layer, or as long as the
    context.

    Takes the parsed config: Qwen2 and Qwen3 have a window in the layers of that type, Mistral and
    Qwen3-MoE in every layer, Llama none.
    """
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ValueError(f"layer_types: expected a list, got {layer_types!r}")
    unknown_kinds = sorted(
        {str(layer_type) for layer_type in layer_types} - {"full_attention", "sliding_attention"}
    )
    if unknown_kinds:
        raise ValueError(
            f"layer_types: {', '.join(unknown_kinds)} is not supported; only full attention is"
        )
    window = config.get("sliding_window")
    if family in ("mistral", "qwen3_moe"):
        is_used = window is not None
    else:
        is_used = "sliding_attention" in layer_types
    if not is_used:
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


def _rope_settings(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return the rotary base and the scaling. ValueError for an unsupported rope_type."""
    rope = config["rope_parameters"]
    for source in (config, rope):
        if source.get("partial_rotary_factor") not in (None, 1):
            raise ValueError("partial_rotary_factor: only full rotary embeddings are supported")
    theta = _positive(rope, "rope_theta")
    kind = rope["rope_type"]
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
