"""One decoder for the engine and the learner: Qwen2/2.5, Qwen3 and Qwen3-MoE, Llama 3, Mistral.

    hidden_TD = model(ids_T, pos_T, attend)      tokens of any number of sequences, packed, with their positions
    logits_TV = model.logits(hidden_TD)

Attention is an argument (`lowroll.model.attention`), a weight is a Tensor or a QTensor
(`lowroll.model.linear`). q/k/v and gate/up are one matrix each; `lowroll.model.hf` maps them to
Hugging Face names.

Legend: T tokens, D hidden size, H query heads, G key-value heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowroll.kernels.batch_invariant import product
from lowroll.kernels.batch_invariant import rows as invariant
from lowroll.kernels.batch_invariant.heads import rotate_heads as invariant_heads
from lowroll.kernels.fused.norm import add_rms_norm
from lowroll.kernels.fused.rope import rotate_heads
from lowroll.kernels.quantize.rows import Product, QuantizedRows
from lowroll.model import logprobs
from lowroll.model.attention import Attend, exact_varlen, varlen
from lowroll.model.experts import Experts
from lowroll.model.layers import LEARNER, Layers
from lowroll.model.linear import Linear
from lowroll.model.recompute import remake
from lowroll.model.rope import inverse_frequencies, rotations
from lowroll.model.spec import ModelSpec
from lowroll.quant import mixed
from lowroll.quant.formats import QTensor

Stream = Tensor | Product  # the reader applies a low-bit product's scales


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with float32 statistics. `noise` (`weights.noise`) is added to the
    weight, in float32."""

    def __init__(
        self, size: int, eps: float, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.eps = eps
        self.noise: Tensor | None = None
        self.exact = False  # see `Transformer.be_exact`

    def forward(self, x: Tensor) -> Tensor:
        normed = self.add(x, None)[1]
        assert isinstance(normed, Tensor)
        return normed

    def add(
        self, x_TD: Tensor, update_TD: Tensor | Product | None, rows: str | None = None
    ) -> tuple[Tensor, Tensor | QuantizedRows]:
        """Return (x + update, its norm) in one pass, the norm quantized to `rows` if given."""
        add = invariant.add_rms_norm if self.exact else add_rms_norm
        return add(x_TD, update_TD, self.gain, self.eps, rows)

    @property
    def gain(self) -> Tensor:
        if self.noise is None:
            return self.weight
        return self.weight.float() + self.noise


class Block(nn.Module):
    """Pre-norm attention and SwiGLU (or experts), each with a residual."""

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
        self.exact = False  # see `Transformer.be_exact`
        self.heads = spec.num_heads
        self.kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        q = spec.num_heads * spec.head_dim
        kv = spec.num_kv_heads * spec.head_dim
        hidden = spec.hidden_size
        mlp_size = spec.intermediate_size
        self.input_norm = RMSNorm(hidden, spec.norm_eps, device, dtype)
        self.qkv = layers.linear(
            hidden, {"q_proj": q, "k_proj": kv, "v_proj": kv}, spec.qkv_bias, device, dtype
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, device, dtype)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, device, dtype)
        self.o = layers.linear(q, {"o_proj": hidden}, spec.o_bias, device, dtype)
        self.post_attention_norm = RMSNorm(hidden, spec.norm_eps, device, dtype)
        self.experts = layers.experts(spec, device, dtype) if spec.num_experts else None
        if self.experts is not None:
            return
        self.gate_up = layers.linear(
            hidden, {"gate_proj": mlp_size, "up_proj": mlp_size}, spec.mlp_bias, device, dtype
        )
        self.down = layers.linear(mlp_size, {"down_proj": hidden}, spec.mlp_bias, device, dtype)

    def forward(
        self,
        x_TD: Tensor,
        update_TD: Stream | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted_P: Tensor | None = None,
    ) -> tuple[Tensor, Stream]:
        """Return the residual stream, and this block's update, which the next norm adds.
        `update_TD`: the previous block's. wanted_P: the tokens that continue after attention; keys
        and values are always all written."""
        x_TD, normed = self.input_norm.add(x_TD, update_TD, self.qkv.row_kind)
        remake(normed, self.input_norm, x_TD)
        rows = None if self.experts is not None else self.gate_up.row_kind
        added_TD = self.attention(normed, cos, sin, attend, wanted_P)
        if wanted_P is not None:
            x_TD = x_TD[wanted_P]
        x_TD, normed = self.post_attention_norm.add(x_TD, added_TD, rows)
        remake(normed, self.post_attention_norm, x_TD)
        return x_TD, self.mlp(normed)

    def attention(
        self,
        x_TD: Tensor | QuantizedRows,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted_P: Tensor | None = None,
    ) -> Stream:
        q_norm = None if self.q_norm is None else self.q_norm.gain
        k_norm = None if self.k_norm is None else self.k_norm.gain
        rotate = invariant_heads if self.exact else rotate_heads
        q_THd, k_TGd, v_TGd = rotate(
            self.qkv(x_TD),
            cos,
            sin,
            self.heads,
            self.kv_heads,
            self.head_dim,
            q_norm,
            k_norm,
            self.input_norm.eps,
        )
        o_THd = attend(self.layer, q_THd, k_TGd, v_TGd)
        if wanted_P is not None:
            o_THd = o_THd[wanted_P]
        return self.o(self.o.read(o_THd.reshape(o_THd.shape[0], -1)))

    def mlp(self, x_TD: Tensor | QuantizedRows) -> Stream:
        if self.experts is not None:
            assert isinstance(x_TD, Tensor)
            return self.experts(x_TD)
        gate_up, update = self.gate_up.base_and_update(x_TD)
        remake(gate_up, lambda x: self.gate_up.base_and_update(x)[0], x_TD, product=True)
        if update is None:
            return self.down.after_swiglu(gate_up)
        assert isinstance(gate_up, Tensor)
        return self.down.after_update(gate_up, update)


# the call of a block: (block, x, update, cos, sin, attend) -> (x, update)
RunBlock = Callable[
    [Block, Tensor, Stream | None, Tensor, Tensor, Attend], tuple[Tensor, Stream | None]
]


# access to the weights of blocks outside of their calls: (model) -> some blocks at a time, whose
# parameters exist until the next
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
    """The decoder. Parameters are uninitialized: `lowroll.model.hf.load` or `initialize` fills
    them.

    layers: their kind, by default a learner's. A trainer may replace `run_block`, which runs a
    block, and `read_blocks`, which reads weights (`trainer.recompute`, `parallel.sharding`).
    """

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
        # weights that share storage with another model
        self.shared: frozenset[str] = frozenset()
        self.embedding = nn.Parameter(
            torch.empty(spec.vocab_size, spec.hidden_size, device=device, dtype=dtype)
        )
        self.blocks = nn.ModuleList(
            Block(spec, i, device, dtype, layers) for i in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, device, dtype)
        if spec.tie_embeddings:
            self.lm_head = None
        else:
            self.lm_head = nn.Parameter(torch.empty_like(self.embedding))
        # the engine's view of lm_head_weight: same storage, packed for its kernel
        self.head: QTensor | None = None
        self.freqs = inverse_frequencies(spec).to(device if str(device) != "meta" else "cpu")

    def forward(
        self, ids_T: Tensor, pos_T: Tensor, attend: Attend, wanted_P: Tensor | None = None
    ) -> Tensor:
        """Return the final hidden states [T, D] of packed tokens, or of the `wanted` ones [P, D].
        Others are skipped after the last attention on CUDA; elsewhere fewer rows would change last
        bits."""
        if self.freqs.device != ids_T.device:
            self.freqs = self.freqs.to(ids_T.device)
        cos, sin = rotations(pos_T, self.freqs)
        x_TD = F.embedding(ids_T, self.embedding)
        update_TD: Stream | None = None
        early_P = wanted_P if ids_T.is_cuda else None
        for block in self.blocks:
            assert isinstance(block, Block)
            if early_P is not None and block is self.blocks[-1]:
                x_TD, update_TD = block(x_TD, update_TD, cos, sin, attend, early_P)
            else:
                x_TD, update_TD = self.run_block(block, x_TD, update_TD, cos, sin, attend)
        normed_TD = self.norm.add(x_TD, update_TD)[1]
        assert isinstance(normed_TD, Tensor)
        return normed_TD if wanted_P is None or early_P is not None else normed_TD[wanted_P]

    def be_exact(self) -> Transformer:
        """Make every row's bits independent of its batch (`kernels.batch_invariant`).
        `model.exact.refuse` has the conditions."""
        for module in self.modules():
            if isinstance(module, Transformer | Block | RMSNorm | Linear | Experts):
                module.exact = True
        return self

    def causal(self, lengths: Sequence[int]) -> Attend:
        return (exact_varlen if self.exact else varlen)(lengths, self.device)

    @property
    def lm_head_weight(self) -> Tensor:
        """The matrix [V, D] from hidden states to logits; the embedding when tied."""
        return self.embedding if self.lm_head is None else self.lm_head

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits [T, V], float32 on CUDA in half precision (`logprobs.logits`), else in the
        model's dtype."""
        if self.exact:
            return product.linear(hidden_TD, self.lm_head_weight, dtype=torch.float32)
        if self.head is None or hidden_TD.is_cuda:
            return logprobs.logits(hidden_TD, self.lm_head_weight)
        return self.head.linear(hidden_TD)

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """Yield every quantizable linear layer by name (not lm_head or embedding)."""
        return (
            (name, module) for name, module in self.named_modules() if isinstance(module, Linear)
        )

    def requires_grad_(self, requires_grad: bool = True) -> Transformer:
        """Set whether all parameters are trained. ValueError for quantized weights."""
        if requires_grad and self.weight_format is not None:
            raise ValueError(
                f"the linear weights are {self.weight_format} codes, which have no gradient; "
                "dequantize them (weights.publish.dequantize_base), or train an adapter on them "
                "(model.lora.attach)"
            )
        super().requires_grad_(requires_grad)
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
        """The format of the quantized linear weights (a mixed one's name if they differ), or
        None."""
        weights = {name: linear.weight for name, linear in self.linears()}
        formats = {name: w.format for name, w in weights.items() if isinstance(w, QTensor)}
        if len(formats) < len(weights):
            return None
        if len(set(formats.values())) == 1:
            return next(iter(formats.values()))
        return mixed.register(formats, {name: prod(w.shape) for name, w in weights.items()})


def whole(block: Block, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    """Run a block with its addition, so that one tensor is kept for the backward pass."""
    x_TD, update_TD = block(x_TD, None, cos, sin, attend)
    return x_TD + update_TD


def initialize(model: Transformer, seed: int, std: float = 0.02) -> Transformer:
    """Fill with seeded random weights: N(0, std) matrices (residual outputs scaled by 1/sqrt(2
    layers)), unit norms."""
    generator = torch.Generator().manual_seed(seed)
    shrink = (2 * model.spec.num_layers) ** -0.5
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            scale = std * shrink if name.endswith(("o.weight", "down.weight")) else std
            p.copy_(torch.randn(p.shape, generator=generator) * scale)
    return model
