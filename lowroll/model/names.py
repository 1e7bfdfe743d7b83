"""Hugging Face names of the parameters and of fused matrices' parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lowroll.model.families.base import LatentSpec
from lowroll.model.spec import ModelSpec
from lowroll.quant.layouts import LINEARS

# matrices that some checkpoints hold as one
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

# parameters that are float32 in every model and never trained
FIXED = ".router.correction_bias"
FIXED_STORED = ".e_score_correction_bias"  # in checkpoints


Names = tuple[str, list[str], tuple[int, ...]]


def stored_hf_names(spec: ModelSpec) -> Iterator[Names]:
    """Yield `hf_names` as in the spec's source folder."""
    return hf_names(spec, spec.stored_prefix)


def hf_names(spec: ModelSpec, prefix: str = "model.") -> Iterator[Names]:
    """Yield (internal name, HF names of the stacked parts, shape) of every parameter, in the order
    of published files."""
    embedding_shape = (spec.vocab_size, spec.hidden_size)
    yield "embedding", [f"{prefix}embed_tokens.weight"], embedding_shape
    for i in range(spec.num_layers):
        layer = f"{prefix}layers.{i}"
        norms = {
            name: (f"{name}.weight", [f"{layer}.{hf_norm}.weight"], (spec.hidden_size,))
            for name, hf_norm in spec.norms
        }
        in_block: list[Names] = []
        if "input_norm" in norms:
            in_block.append(norms.pop("input_norm"))
        in_block += [*_mixer_names(spec, i, layer), *norms.values()]
        if spec.has_experts(i):
            in_block += _expert_names(spec, f"{layer}.mlp")
            if spec.mixture.shared_size > 0:
                in_block += _shared_names(spec, f"{layer}.mlp")
        else:
            in_block += _mlp_names(spec, f"{layer}.mlp")
        for name, parts, shape in in_block:
            yield f"blocks.{i}.{name}", parts, shape
    yield "norm.weight", [f"{prefix}norm.weight"], (spec.hidden_size,)
    if not spec.tie_embeddings:
        yield "lm_head", ["lm_head.weight"], embedding_shape


def _mixer_names(spec: ModelSpec, i: int, layer: str) -> Iterator[Names]:
    if spec.layers and spec.layers[i].mixer == "delta":
        return _delta_names(spec, f"{layer}.linear_attn")
    if spec.latent is not None:
        return _latent_names(spec, spec.latent, f"{layer}.self_attn")
    return _attention_names(spec, f"{layer}.self_attn")


def _delta_names(spec: ModelSpec, net: str) -> Iterator[Names]:
    sizes = spec.delta
    assert sizes is not None
    hidden, heads = spec.hidden_size, sizes.value_heads
    qkvz = [f"{net}.{part}.weight" for part in sizes.input_parts]
    yield "delta.qkvz.weight", qkvz, (sizes.channels + sizes.values, hidden)
    ba = [f"{net}.{part}.weight" for part in sizes.rate_parts]
    yield "delta.ba_weight", ba, (2 * heads, hidden)
    yield "delta.conv_weight", [f"{net}.conv1d.weight"], (sizes.channels, 1, sizes.taps)
    yield "delta.decay_log", [f"{net}.A_log"], (heads,)
    yield "delta.dt_bias", [f"{net}.dt_bias"], (heads,)
    yield "delta.norm_weight", [f"{net}.norm.weight"], (sizes.value_dim,)
    yield "delta.o.weight", [f"{net}.out_proj.weight"], (hidden, sizes.values)


def _latent_names(spec: ModelSpec, sizes: LatentSpec, attention: str) -> Iterator[Names]:
    norms = {"q_b": ("q_norm", "q_a_layernorm"), "kv_b": ("kv_norm", "kv_a_layernorm")}
    matrices = sizes.matrices(spec.num_heads, spec.hidden_size)
    for name, (parts, in_features) in matrices.items():
        if name in norms:
            norm, hf_norm = norms[name]
            yield f"latent.{norm}.weight", [f"{attention}.{hf_norm}.weight"], (in_features,)
        stored = [f"{attention}.{part}.weight" for part in parts]
        yield f"latent.{name}.weight", stored, (sum(parts.values()), in_features)


def _attention_names(spec: ModelSpec, attention: str) -> Iterator[Names]:
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q_and_gate = q * (1 + spec.attention_gate)
    qkv = [f"{attention}.{part}" for part in stored_parts(spec, "qkv")]
    yield "qkv.weight", [f"{part}.weight" for part in qkv], (q_and_gate + 2 * kv, spec.hidden_size)
    if spec.qkv_bias:
        yield "qkv.bias", [f"{part}.bias" for part in qkv], (q_and_gate + 2 * kv,)
    if spec.qk_norm:
        q_size, k_size = (q, kv) if spec.qk_norm == "whole" else (spec.head_dim, spec.head_dim)
        yield "q_norm.weight", [f"{attention}.q_norm.weight"], (q_size,)
        yield "k_norm.weight", [f"{attention}.k_norm.weight"], (k_size,)
    if spec.attention_sinks:
        yield "sinks", [f"{attention}.sinks"], (spec.num_heads,)
    yield "o.weight", [f"{attention}.o_proj.weight"], (spec.hidden_size, q)
    if spec.o_bias:
        yield "o.bias", [f"{attention}.o_proj.bias"], (spec.hidden_size,)


def _mlp_names(spec: ModelSpec, mlp: str) -> Iterator[Names]:
    hidden, size = spec.hidden_size, spec.intermediate_size
    gate_up = [f"{mlp}.{part}" for part in stored_parts(spec, "gate_up", size)]
    yield "gate_up.weight", [f"{part}.weight" for part in gate_up], (2 * size, hidden)
    yield "down.weight", [f"{mlp}.down_proj.weight"], (hidden, size)
    if spec.mlp_bias:
        yield "gate_up.bias", [f"{part}.bias" for part in gate_up], (2 * size,)
        yield "down.bias", [f"{mlp}.down_proj.bias"], (hidden,)


def _shared_names(spec: ModelSpec, mlp: str) -> Iterator[Names]:
    hidden, mixture = spec.hidden_size, spec.mixture
    size = mixture.shared_size
    shared = f"{mlp}.shared_expert" if mixture.shared_gate else f"{mlp}.shared_experts"
    gate_up = [f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"]
    yield "gate_up.weight", gate_up, (2 * size, hidden)
    yield "down.weight", [f"{shared}.down_proj.weight"], (hidden, size)
    if mixture.shared_gate:
        yield "shared_gate", [f"{mlp}.shared_expert_gate.weight"], (1, hidden)


def _expert_names(spec: ModelSpec, mlp: str) -> Iterator[Names]:
    hidden, mixture = spec.hidden_size, spec.mixture
    size, count = mixture.expert_size, mixture.num_experts
    experts = [f"{mlp}.experts.{e}" for e in range(count)]
    router = f"{mlp}.{_router(spec)}"
    gate_up = [f"{expert}.{part}_proj" for expert in experts for part in ("gate", "up")]
    down = [f"{expert}.down_proj" for expert in experts]
    gate_up_rows, down_rows = 2 * count * size, count * hidden
    yield "experts.router.weight", [f"{router}.weight"], (count, hidden)
    if mixture.scores is not None:
        yield f"experts{FIXED}", [f"{router}{FIXED_STORED}"], (count,)
    yield "experts.gate_up.weight", [f"{part}.weight" for part in gate_up], (gate_up_rows, hidden)
    yield "experts.down.weight", [f"{part}.weight" for part in down], (down_rows, size)
    if mixture.has_biases:
        yield "experts.router.bias", [f"{router}.bias"], (count,)
        yield "experts.gate_up.bias", [f"{part}.bias" for part in gate_up], (gate_up_rows,)
        yield "experts.down.bias", [f"{part}.bias" for part in down], (down_rows,)


def _router(spec: ModelSpec) -> str:
    return "router" if spec.mixture.stacked else "gate"


def dense_modules(spec: ModelSpec) -> list[str]:
    routers = [f"mlp.{_router(spec)}"] if spec.mixture.num_experts else []
    gates = ["mlp.shared_expert_gate"] if spec.mixture.gates_shared else []
    rates = [] if spec.delta is None else [f"linear_attn.{p}" for p in spec.delta.rate_parts]
    return [*routers, *gates, *rates]


def stored_parts(spec: ModelSpec, name: str, mlp_size: int = 0) -> dict[str, int]:
    """Return the rows of the stored matrices of `qkv` or `gate_up`, in order, with the gate's in q.
    mlp_size: the rows of gate, and of up."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q_and_gate = q * (1 + spec.attention_gate)
    rows = (q_and_gate, kv, kv) if name == "qkv" else (mlp_size, mlp_size)
    sizes = dict(zip(FUSED[f"{name}_proj"], rows, strict=True))
    return {f"{name}_proj": sum(sizes.values())} if name in spec.fused else sizes


def features_read(spec: ModelSpec) -> dict[str, int]:
    """Return the in features of each kind of matrix by HF name; "down_proj" is an expert's in a
    mixture (`widths_of_down`)."""
    mlp_size = spec.mixture.expert_size if spec.mixture.num_experts else spec.intermediate_size
    hidden = spec.hidden_size
    if spec.latent is not None:
        attention = spec.latent.in_features(spec.num_heads, hidden)
    else:
        attention = dict.fromkeys(stored_parts(spec, "qkv"), hidden)
        attention["o_proj"] = spec.num_heads * spec.head_dim
    mlp = {**dict.fromkeys(stored_parts(spec, "gate_up"), hidden), "down_proj": mlp_size}
    if spec.delta is None:
        return attention | mlp
    delta = {**dict.fromkeys(spec.delta.input_parts, hidden), "out_proj": spec.delta.values}
    return attention | mlp | delta


def widths_of_down(spec: ModelSpec) -> set[int]:
    widths = {spec.intermediate_size} if spec.layers_with_experts < spec.num_layers else set()
    mixture = spec.mixture
    if not mixture.num_experts:
        return widths
    shared = {mixture.shared_size} if mixture.shared_size else set()
    return widths | shared | {mixture.expert_size}


def is_fixed(name: str) -> bool:
    """Return whether a parameter, by either name, is one of FIXED."""
    return name.endswith((FIXED, FIXED_STORED))


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if is_fixed(name) else dtype


def part_rows(spec: ModelSpec, hf_name: str, whole: int) -> int:
    """Return an HF tensor's rows in its internal parameter of `whole` rows."""
    part = hf_name.rsplit(".", 2)[-2]
    mlp_size = spec.intermediate_size
    if ".mlp.experts." in hf_name:
        mlp_size = spec.mixture.expert_size
    elif ".shared_expert" in hf_name:
        mlp_size = spec.mixture.shared_size
    if part == "down_proj":
        return spec.hidden_size
    delta_rows = {} if spec.delta is None else spec.delta.input_parts | spec.delta.rate_parts
    rows_by_part = {
        **delta_rows,
        "q_proj": spec.num_heads * spec.head_dim * (1 + spec.attention_gate),
        "k_proj": spec.num_kv_heads * spec.head_dim,
        "v_proj": spec.num_kv_heads * spec.head_dim,
        "gate_proj": mlp_size,
        "up_proj": mlp_size,
    }
    if spec.latent is not None:
        for parts, _ in spec.latent.matrices(spec.num_heads, spec.hidden_size).values():
            rows_by_part |= parts
    return rows_by_part.get(part, whole)


def is_linear(hf_name: str) -> bool:
    return hf_name.endswith(".weight") and hf_name.removesuffix(".weight").endswith(LINEARS)


def module_of(parts: dict[str, tuple[int, ...]]) -> str:
    return next(iter(parts)).removesuffix(".weight")
