"""One decoder for the engine and the learner, of all families (`lowroll.model.families`).

    hidden_TD = model(ids_T, pos_T, attend)      tokens of packed sequences, with their positions
    logits_TV = model.logits(hidden_TD)

A weight is a Tensor or a QTensor. q/k/v and gate/up are one matrix each.

Legend: `model`; F intermediate size, P wanted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowroll.kernels.batch_invariant import product
from lowroll.kernels.batch_invariant.heads import rotate_heads as invariant_heads
from lowroll.kernels.fused.rope import rotate_heads
from lowroll.kernels.launch import triton_supports
from lowroll.kernels.matmul import ordered
from lowroll.kernels.quantize.rows import QuantizedRows, quantize_rows
from lowroll.model import logprobs, shared_prompts
from lowroll.model.attention import Attend, AttentionInputs, exact_varlen, varlen
from lowroll.model.delta_net import GatedDeltaNet, Mixing, packed_recurrence
from lowroll.model.experts import Experts
from lowroll.model.families.base import LayerSpec
from lowroll.model.latent_attention import LatentAttention
from lowroll.model.layers import LEARNER, Layers
from lowroll.model.linear import Linear
from lowroll.model.names import is_fixed, stored_parts
from lowroll.model.recompute import remake
from lowroll.model.residual_stream import RMSNorm, Stream, dense
from lowroll.model.rope import head_order, inverse_frequencies, magnitudes, rotations
from lowroll.model.shared_prompts import PromptGroup
from lowroll.model.spec import ModelSpec
from lowroll.quant import mixed
from lowroll.quant.formats import QTensor

COMPACT_HEAD_ROWS = 4  # more take longer than reading float32 (docs/LOG.md)


class Block(nn.Module):
    """Attention and an MLP or experts, each with a residual and norms (`ModelSpec.norms`)."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        device: torch.device | str,
        dtype: torch.dtype,
        layers: Layers,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.exact = False
        self.heads = spec.num_heads
        self.kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.eps = spec.norm_eps
        self.query_scale, self.update_scale = spec.query_scale, spec.update_scale
        layer_spec = spec.layers[layer] if spec.layers else LayerSpec()
        # layers without positions have the row after all ropes
        self.rope = len(spec.ropes) if layer_spec.rope is None else layer_spec.rope
        self.order = head_order(spec)
        hidden = spec.hidden_size

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, spec.norm_eps, device, dtype, spec.norm_offset)

        norms = {name: norm(hidden) for name, _ in spec.norms}
        self.input_norm = norms.get("input_norm")
        self.norms_whole = spec.qk_norm == "whole"
        self.has_gate = spec.attention_gate
        self.sinks: nn.Parameter | None = None
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.delta: GatedDeltaNet | None = None
        self.latent: LatentAttention | None = None
        if spec.latent is not None:
            self.latent = LatentAttention(layer, spec, device, dtype, layers)
        elif layer_spec.mixer == "delta":
            assert spec.delta is not None
            self.delta = GatedDeltaNet(
                layer, hidden, spec.delta, spec.norm_eps, device, dtype, layers
            )
        else:
            self._add_attention(spec, norm, device, dtype, layers)
        self.attention_out_norm = norms.get("attention_out_norm")
        self.post_attention_norm = norms.get("post_attention_norm")
        self.mlp_out_norm = norms.get("mlp_out_norm")
        self._add_mlp(spec, device, dtype, layers)

    def _add_mlp(
        self, spec: ModelSpec, device: torch.device | str, dtype: torch.dtype, layers: Layers
    ) -> None:
        hidden, mlp_size = spec.hidden_size, spec.intermediate_size
        self.activation = spec.activation
        has_experts = spec.has_experts(self.layer)
        self.experts = layers.experts(spec, device, dtype) if has_experts else None
        self.has_shared_expert = has_experts and spec.mixture.shared_size > 0
        self.shared_gate: nn.Parameter | None = None
        if has_experts:
            mlp_size = spec.mixture.shared_size
            if not mlp_size:
                return
            if spec.mixture.shared_gate:
                self.shared_gate = nn.Parameter(torch.empty(1, hidden, device=device, dtype=dtype))
        self.gate_up = layers.linear(
            hidden, stored_parts(spec, "gate_up", mlp_size), spec.mlp_bias, device, dtype
        )
        self.down = layers.linear(mlp_size, {"down_proj": hidden}, spec.mlp_bias, device, dtype)

    def _add_attention(
        self,
        spec: ModelSpec,
        norm: Callable[[int], RMSNorm],
        device: torch.device | str,
        dtype: torch.dtype,
        layers: Layers,
    ) -> None:
        hidden = spec.hidden_size
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv = layers.linear(hidden, stored_parts(spec, "qkv"), spec.qkv_bias, device, dtype)
        if spec.qk_norm:
            self.q_norm = norm(q if self.norms_whole else spec.head_dim)
            self.k_norm = norm(kv if self.norms_whole else spec.head_dim)
        if spec.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(spec.num_heads, device=device, dtype=dtype))
        self.o = layers.linear(q, {"o_proj": hidden}, spec.o_bias, device, dtype)

    def forward(
        self,
        x_TD: Tensor,
        update_TD: Stream | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted_P: Tensor | None = None,
    ) -> tuple[Tensor, Stream]:
        """Return the residual stream, and the update by this block's MLP, which the next norm adds.
        update_TD: the previous block's. wanted_P: the tokens that go on after attention; keys and
        values of all are written."""
        reader = self.mixer_reader
        mixer_rows = None if reader is None else reader.row_kind
        mlp_rows = None if self.experts is not None else self.gate_up.row_kind
        x_TD, normed = self._add(x_TD, update_TD, self.input_norm, mixer_rows)
        mixed_TD = self._mix(normed, cos, sin, attend, wanted_P)
        mixed_TD = self._scaled(mixed_TD, self.attention_out_norm)
        if wanted_P is not None:
            x_TD = x_TD[wanted_P]
        x_TD, normed = self._add(x_TD, mixed_TD, self.post_attention_norm, mlp_rows)
        return x_TD, self._scaled(self.mlp(normed), self.mlp_out_norm)

    @property
    def mixer_reader(self) -> Linear | None:
        """The matrix that reads the norm before attention; None in a recurrent layer."""
        if self.delta is not None:
            return None
        return self.qkv if self.latent is None else self.latent.qkv_a

    def _mix(
        self,
        normed: Tensor | QuantizedRows,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted_P: Tensor | None,
    ) -> Stream:
        if self.latent is not None:
            return self.latent(normed, cos[self.rope], sin[self.rope], attend, wanted_P)
        if self.delta is None:
            return self.attention(normed, cos, sin, attend, wanted_P)
        assert isinstance(normed, Tensor)
        mixed_TD = self.delta(normed, attend.recur)  # type: ignore[attr-defined]
        return mixed_TD if wanted_P is None else dense(mixed_TD)[wanted_P]

    @property
    def pre_norms(self) -> tuple[RMSNorm, RMSNorm]:
        """The norms before attention and MLP. ValueError for a block without them."""
        if self.input_norm is None or self.post_attention_norm is None:
            raise ValueError("the model has no norms in front of attention and MLP")
        return self.input_norm, self.post_attention_norm

    def _add(
        self, x_TD: Tensor, update_TD: Stream | None, norm: RMSNorm | None, rows: str | None
    ) -> tuple[Tensor, Tensor | QuantizedRows]:
        """Return (x + update, input of the next layer). rows: the kind of quantized rows that it
        reads."""
        if norm is None:
            x_TD = x_TD if update_TD is None else x_TD + dense(update_TD)
            return x_TD, x_TD if rows is None else quantize_rows(x_TD, rows)
        x_TD, normed = norm.add(x_TD, update_TD, rows)
        remake(normed, norm, x_TD)
        return x_TD, normed

    def _scaled(self, update_TD: Stream, norm: RMSNorm | None) -> Stream:
        if norm is not None:
            update_TD = norm(dense(update_TD))
        return update_TD if self.update_scale == 1 else dense(update_TD) * self.update_scale

    def attention(
        self,
        x_TD: Tensor | QuantizedRows,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted_P: Tensor | None = None,
    ) -> Stream:
        """Return the update by attention. cos, sin: of all ropes, [R + 1, T, 1, d/2]."""
        rotate = invariant_heads if self.exact else rotate_heads
        qkv, gate = self._split_gate(self.qkv(x_TD))
        q_gain = k_gain = None  # `rotate` applies them
        if self.norms_whole:
            qkv = self._norm_whole(qkv)
        elif self.q_norm is not None and self.k_norm is not None:
            q_gain, k_gain = self.q_norm.gain, self.k_norm.gain
        qkv, q_gain, k_gain = self._reorder(qkv, q_gain, k_gain)
        q_THd, k_TGd, v_TGd = rotate(
            qkv,
            cos[self.rope],
            sin[self.rope],
            self.heads,
            self.kv_heads,
            self.head_dim,
            q_gain,
            k_gain,
            self.eps,
        )
        if self.query_scale != 1:
            q_THd = q_THd * self.query_scale
        o_THd = attend(self.layer, AttentionInputs(q_THd, k_TGd, v_TGd, self.sinks))
        if gate is not None:
            o_THd = o_THd * gate.sigmoid()
        if wanted_P is not None:
            o_THd = o_THd[wanted_P]
        return self.o(self.o.read(o_THd.reshape(o_THd.shape[0], -1)))

    def _split_gate(self, qkv: Stream) -> tuple[Stream, Tensor | None]:
        """Return q, k and v, and the gate [T, H, d], stored behind each head of q."""
        if not self.has_gate:
            return qkv, None
        q_size = 2 * self.heads * self.head_dim
        q_and_gate, kv = dense(qkv).tensor_split([q_size], dim=1)
        q, gate = q_and_gate.unflatten(1, (self.heads, 2, self.head_dim)).unbind(2)
        return torch.cat([q.flatten(1), kv], dim=1), gate

    def _norm_whole(self, qkv: Stream) -> Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = dense(qkv).split([q_size, kv_size, kv_size], dim=1)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=1)

    def _reorder(
        self, qkv: Stream, q_gain: Tensor | None, k_gain: Tensor | None
    ) -> tuple[Stream, Tensor | None, Tensor | None]:
        """Return q, k and v [T, (H + 2 G) d] and the gains [d], in the rotating kernel's order
        (`rope.head_order`)."""
        if self.order is None:
            return qkv, q_gain, k_gain
        heads_THd = dense(qkv).unflatten(1, (-1, self.head_dim))
        if self.order.device != heads_THd.device:
            self.order = self.order.to(heads_THd.device)  # once: graphs copy nothing
        order_d = self.order
        rotated = self.heads + self.kv_heads
        q_and_k_THd = heads_THd[:, :rotated, order_d]
        reordered_THd = torch.cat([q_and_k_THd, heads_THd[:, rotated:]], dim=1)
        if q_gain is not None and k_gain is not None:
            q_gain, k_gain = q_gain[order_d], k_gain[order_d]
        return reordered_THd.flatten(1), q_gain, k_gain

    def mlp(self, x_TD: Tensor | QuantizedRows) -> Stream:
        if self.experts is not None:
            assert isinstance(x_TD, Tensor)
            y_TD = self.experts(x_TD)
            return y_TD + self._shared_expert(x_TD) if self.has_shared_expert else y_TD
        return self._dense_mlp(x_TD)

    def _shared_expert(self, x_TD: Tensor) -> Tensor:
        y_TD = dense(self._dense_mlp(self.gate_up.read(x_TD)))
        if self.shared_gate is None:
            return y_TD
        return y_TD * F.linear(x_TD, self.shared_gate).sigmoid()

    def _dense_mlp(self, x_TD: Tensor | QuantizedRows) -> Stream:
        if self.activation != "silu":
            gate_TF, up_TF = dense(self.gate_up(x_TD)).chunk(2, dim=1)
            return self.down(self.down.read(F.gelu(gate_TF, approximate="tanh") * up_TF))
        gate_up, update = self.gate_up.base_and_update(x_TD)
        remake(gate_up, lambda x: self.gate_up.base_and_update(x)[0], x_TD, product=True)
        if update is None:
            return self.down.after_swiglu(gate_up)
        assert isinstance(gate_up, Tensor)
        return self.down.after_update(gate_up, update)


RunBlock = Callable[
    [Block, Tensor, Stream | None, Tensor, Tensor, Attend], tuple[Tensor, Stream | None]
]


# Yields some blocks at a time, whose parameters exist until the next.
ReadBlocks = Callable[["Transformer"], Iterator[list[Block]]]


def all_blocks(model: Transformer) -> Iterator[list[Block]]:
    yield [block for block in model.blocks if isinstance(block, Block)]


def run_block(
    block: Block,
    x_TD: Tensor,
    update_TD: Stream | None,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
) -> tuple[Tensor, Stream | None]:
    return block(x_TD, update_TD, cos, sin, attend)


class Transformer(nn.Module):
    """The decoder, uninitialized until `lowroll.model.hf.load` or `initialize`. A trainer may
    replace `run_block` and `read_blocks` (`trainer.recompute`, `parallel.sharding`)."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        layers: Layers = LEARNER,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.run_block: RunBlock = run_block
        self.read_blocks: ReadBlocks = all_blocks
        self.exact = False
        # names of weights shared with another model
        self.shared: frozenset[str] = frozenset()
        self.embedding = nn.Parameter(
            torch.empty(spec.vocab_size, spec.hidden_size, device=device, dtype=dtype)
        )
        self.blocks = nn.ModuleList(
            Block(spec, i, device, dtype, layers) for i in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, device, dtype, spec.norm_offset)
        if spec.tie_embeddings:
            self.lm_head = None
        else:
            self.lm_head = nn.Parameter(torch.empty_like(self.embedding))
        # the engine's view of lm_head_weight
        self.head: QTensor | None = None
        self.freqs = inverse_frequencies(spec).to(device if str(device) != "meta" else "cpu")
        self.magnitudes = magnitudes(spec)  # moves to the device once, as graphs may not copy

    def forward(
        self, ids_T: Tensor, pos_T: Tensor, attend: Attend, wanted_P: Tensor | None = None
    ) -> Tensor:
        """Return the final hidden states [T, D], or [P, D] of the indices `wanted_P`. On CUDA the
        last block drops the others after attention; elsewhere that would change last bits."""
        cos, sin = self.rotations(pos_T)
        x_TD = self.embed(ids_T)
        update_TD: Stream | None = None
        drops_in_last_block = wanted_P is not None and ids_T.is_cuda
        for block in self.blocks:
            assert isinstance(block, Block)
            if drops_in_last_block and block is self.blocks[-1]:
                x_TD, update_TD = block(x_TD, update_TD, cos, sin, attend, wanted_P)
            else:
                x_TD, update_TD = self.run_block(block, x_TD, update_TD, cos, sin, attend)
        normed_TD = self.norm.add(x_TD, update_TD)[1]
        assert isinstance(normed_TD, Tensor)
        hidden_TD = self._for_head(normed_TD)
        if wanted_P is None or drops_in_last_block:
            return hidden_TD
        return hidden_TD[wanted_P]

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return the scaled embeddings [T, D]."""
        x_TD = F.embedding(ids_T, self.embedding)
        if self.spec.embedding_scale == 1:
            return x_TD
        # rounded to the dtype, as in transformers' Gemma
        return x_TD * torch.tensor(self.spec.embedding_scale, dtype=x_TD.dtype).item()

    def rotations(self, pos_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) [R, T, 1, d/2] of all ropes, float32."""
        if self.freqs.device != pos_T.device:
            self.freqs = self.freqs.to(pos_T.device)
        cos, sin = rotations(pos_T, self.freqs)
        if self.magnitudes is None:
            return cos, sin
        if self.magnitudes.device != pos_T.device:
            self.magnitudes = self.magnitudes.to(pos_T.device)
        return cos * self.magnitudes, sin * self.magnitudes

    def final(self, x_TD: Tensor) -> Tensor:
        return self._for_head(self.norm(x_TD))

    def _for_head(self, normed_TD: Tensor) -> Tensor:
        scale = self.spec.hidden_scale
        return normed_TD if scale == 1 else normed_TD * scale

    def be_exact(self) -> Transformer:
        """Make every row's bits independent of its batch (`model.exact`)."""
        for module in self.modules():
            if isinstance(module, Transformer | Block | RMSNorm | Linear | Experts):
                module.exact = True
        return self

    def causal(self, lengths: Sequence[int]) -> Attend:
        if self.exact:
            return exact_varlen(lengths, self.device)
        attend = varlen(lengths, self.device, self.spec.windows)
        return attend if self.spec.delta is None else Mixing(attend, packed_recurrence(lengths))

    @property
    def can_share_prompts(self) -> bool:
        """Whether `causal_in_groups` has the model's attention."""
        return not shared_prompts.obstacle(self.spec, self.device, self.dtype)

    def causal_in_groups(self, groups: Sequence[PromptGroup]) -> Attend:
        if self.exact:
            return shared_prompts.exact_grouped(groups, self.device)
        return shared_prompts.grouped(groups, self.device)

    @property
    def lm_head_weight(self) -> Tensor:
        """The matrix [V, D] of logits; the embedding when tied."""
        return self.embedding if self.lm_head is None else self.lm_head

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits [T, V], float32 on CUDA in half precision, else in the model's dtype."""
        if self.exact:
            if (compact := self._compact_head(hidden_TD)) is not None:
                return ordered.compact_product(hidden_TD, compact)
            return product.linear(hidden_TD, self.lm_head_weight, dtype=torch.float32)
        if self.head is None or hidden_TD.is_cuda:
            return logprobs.logits(hidden_TD, self.lm_head_weight)
        return self.head.linear(hidden_TD)

    def _compact_head(self, hidden_TD: Tensor) -> ordered.Compact | None:
        """Return the head in the fewest bytes with the same logits, if that is faster."""
        if self.head is None or hidden_TD.device.type != "cpu" or hidden_TD.requires_grad:
            return None
        if not 0 < len(hidden_TD) <= COMPACT_HEAD_ROWS or triton_supports(hidden_TD):
            return None
        compact = self.head.derive("compact", lambda q: ordered.compact(q.tensors["weight"]))
        return cast(ordered.Compact | None, compact)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yield every quantizable linear layer."""
        return (
            (name, module) for name, module in self.named_modules() if isinstance(module, Linear)
        )

    def requires_grad_(self, requires_grad: bool = True) -> Transformer:
        """Set whether parameters are trained, except fixed ones (`names.is_fixed`). ValueError for
        quantized weights."""
        if requires_grad and self.weight_format is not None:
            raise ValueError(
                f"the linear weights are {self.weight_format} codes, which have no gradient; "
                "dequantize them (weights.publish.dequantize_base), or train an adapter on them "
                "(model.lora.attach)"
            )
        super().requires_grad_(requires_grad)
        for name, p in self.named_parameters():
            if is_fixed(name):
                p.requires_grad_(False)
        return self

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def weight_format(self) -> str | None:
        """The format of the quantized weights, a mixed one's if they differ, or None."""
        weights = {name: linear.weight for name, linear in self.linears()}
        formats = {name: w.format for name, w in weights.items() if isinstance(w, QTensor)}
        if len(formats) < len(weights):
            return None
        if len(set(formats.values())) == 1:
            return next(iter(formats.values()))
        return mixed.register(formats, {name: prod(w.shape) for name, w in weights.items()})


def whole(block: Block, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    """Run a block and add its update, so that backward keeps one tensor."""
    x_TD, update_TD = block(x_TD, None, cos, sin, attend)
    return x_TD + update_TD


def initialize(model: Transformer, seed: int, std: float = 0.02) -> Transformer:
    """Fill a model with seeded random weights: matrices N(0, std), those that write to the residual
    stream times 1 / sqrt(2 layers). Norms multiply by 1; biases and sinks are 0."""
    generator = torch.Generator().manual_seed(seed)
    output_std = std * (2 * model.spec.num_layers) ** -0.5
    starts_at_zero = ["bias", "sinks"]
    if model.spec.norm_offset:  # norms multiply by weight + 1
        starts_at_zero.append("norm.weight")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.fill_(0.0 if name.endswith(tuple(starts_at_zero)) else 1.0)
                continue
            matrix_std = output_std if name.endswith(("o.weight", "down.weight")) else std
            p.copy_(torch.randn(p.shape, generator=generator) * matrix_std)
    return model
