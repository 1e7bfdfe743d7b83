"""Hugging Face names of the parameters and of fused matrices' parts."""

from __future__ import annotations

from collections.abc import Iterator

from lowroll.model.spec import ModelSpec

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def hf_names(spec: ModelSpec) -> Iterator[tuple[str, list[str], tuple[int, ...]]]:
    """Yield (internal name, HF names of the stacked parts, shape of the whole) of every parameter."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, mlp_size = spec.hidden_size, spec.intermediate_size
    yield "embedding", ["model.embed_tokens.weight"], (spec.vocab_size, hidden)
    for i in range(spec.num_layers):
        internal, hf_layer = f"blocks.{i}", f"model.layers.{i}"
        attention, mlp = f"{hf_layer}.self_attn", f"{hf_layer}.mlp"
        yield f"{internal}.input_norm.weight", [f"{hf_layer}.input_layernorm.weight"], (hidden,)
        qkv = [f"{attention}.{part}_proj" for part in "qkv"]
        yield f"{internal}.qkv.weight", [f"{part}.weight" for part in qkv], (q + 2 * kv, hidden)
        if spec.qkv_bias:
            yield f"{internal}.qkv.bias", [f"{part}.bias" for part in qkv], (q + 2 * kv,)
        if spec.qk_norm:
            yield f"{internal}.q_norm.weight", [f"{attention}.q_norm.weight"], (spec.head_dim,)
            yield f"{internal}.k_norm.weight", [f"{attention}.k_norm.weight"], (spec.head_dim,)
        yield f"{internal}.o.weight", [f"{attention}.o_proj.weight"], (hidden, q)
        if spec.o_bias:
            yield f"{internal}.o.bias", [f"{attention}.o_proj.bias"], (hidden,)
        yield (
            f"{internal}.post_attention_norm.weight",
            [f"{hf_layer}.post_attention_layernorm.weight"],
            (hidden,),
        )
        if spec.num_experts:
            experts = [f"{mlp}.experts.{e}" for e in range(spec.num_experts)]
            yield (
                f"{internal}.experts.router.weight",
                [f"{mlp}.gate.weight"],
                (spec.num_experts, hidden),
            )
            yield (
                f"{internal}.experts.gate_up.weight",
                [f"{expert}.{part}_proj.weight" for expert in experts for part in ("gate", "up")],
                (2 * spec.num_experts * spec.moe_intermediate_size, hidden),
            )
            yield (
                f"{internal}.experts.down.weight",
                [f"{expert}.down_proj.weight" for expert in experts],
                (spec.num_experts * hidden, spec.moe_intermediate_size),
            )
            continue
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        yield (
            f"{internal}.gate_up.weight",
            [f"{part}.weight" for part in gate_up],
            (2 * mlp_size, hidden),
        )
        yield f"{internal}.down.weight", [f"{mlp}.down_proj.weight"], (hidden, mlp_size)
        if spec.mlp_bias:
            yield f"{internal}.gate_up.bias", [f"{part}.bias" for part in gate_up], (2 * mlp_size,)
            yield f"{internal}.down.bias", [f"{mlp}.down_proj.bias"], (hidden,)
    yield "norm.weight", ["model.norm.weight"], (hidden,)
    if not spec.tie_embeddings:
        yield "lm_head", ["lm_head.weight"], (spec.vocab_size, hidden)


def features_read(spec: ModelSpec) -> dict[str, int]:
    """Return the in features of each kind of matrix by HF name ("q_proj", ...)."""
    mlp_size = spec.moe_intermediate_size if spec.num_experts else spec.intermediate_size
    in_features = dict.fromkeys(LINEARS, spec.hidden_size)
    return in_features | {"o_proj": spec.num_heads * spec.head_dim, "down_proj": mlp_size}


def part_rows(spec: ModelSpec, hf_name: str, whole: int) -> int:
    """Return an HF tensor's rows in its fused matrix of `whole` rows."""
    part = hf_name.rsplit(".", 2)[-2]
    mlp_size = spec.moe_intermediate_size or spec.intermediate_size
    if part == "down_proj":
        return spec.hidden_size
    return {
        "q_proj": spec.num_heads * spec.head_dim,
        "k_proj": spec.num_kv_heads * spec.head_dim,
        "v_proj": spec.num_kv_heads * spec.head_dim,
        "gate_proj": mlp_size,
        "up_proj": mlp_size,
    }.get(part, whole)


def is_linear(hf_name: str) -> bool:
    return hf_name.endswith(tuple(f".{part}.weight" for part in LINEARS))


def module_of(parts: dict[str, tuple[int, ...]]) -> str:
    """Return the module of a matrix or of its first part, as files name it."""
    return next(iter(parts)).removesuffix(".weight")
