"""The memory of a learner's pass by block shapes: the tensors that autograd keeps, and temporary
bytes.

CUDA kernels keep less than plain torch (`fused`). Norms and SwiGLU's output are recomputed
(`model.recompute`).

    stream      x after each addition, twice D; two statistics of the norms; inputs of later norms
    attention   rotated q, k, v, the output, log-sum-exp; qkv too with head norms or a kept view
    dense MLP   gate and up, 2F; in plain torch silu(gate) too; for GELU, which is not recomputed,
                also gelu(gate) and their product
    experts     gate, up and down's output of every slot, weights and places of the slots; the
                shared expert is a dense MLP, and keeps its output if it has a gate
    low rank    l of every adapter

Not counted: masks of windows without flash attention, on a CPU and in float32.

Legend: D hidden size, q = H d, kv = G d, F intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from lowroll.config import RunConfig
from lowroll.kernels.fused import avx2 as heads
from lowroll.kernels.training.logprobs import AT_ONCE
from lowroll.model.evicted_attention import MOST_MARKED
from lowroll.model.families.base import PRE_NORMS, LatentSpec
from lowroll.model.logprobs import KEPT
from lowroll.model.spec import ModelSpec
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.runs.assembly import caches
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.memory.weights import adapted, largest

FLOAT = 4
IN_FRONT = [norm for norm, _ in PRE_NORMS]
MOST_PREFILL = 8192  # prompt tokens of a pass (`engine.native`)
MOST_SHORT = 1024  # prompt tokens of a pass that is a graph (`engine.prefill_graphs`)


@dataclass(frozen=True)
class Learning:
    """The settings that decide a block's kept bytes. low: columns of l in a block."""

    spec: ModelSpec
    item: int
    fused: bool
    lora: bool
    low: int
    checkpointing: bool | float
    dense: int  # bytes of the largest dequantized matrix; 0: none
    turned: bool = False  # a CPU kernel rotates heads and copies v

    @classmethod
    def of(cls, cfg: RunConfig, compute: Compute, model: Transformer) -> Learning:
        train = cfg.train
        num_adapted = {
            name.rpartition(".")[2]: len(adapted(cfg, linear)) for name, linear in model.linears()
        }
        item = compute.dtype.itemsize
        forward_format = get_format(compute.format(cfg.forward_weights or cfg.rollout.weights))
        dequantizes = not forward_format.dense and (train.lora or train.forward != "dense")
        return cls(
            spec=model.spec,
            item=item,
            fused=compute.device.type == "cuda",
            lora=train.lora,
            low=train.lora_rank * sum(num_adapted.values()),
            checkpointing=train.sized().activation_checkpointing or False,
            dense=largest(model) * item if dequantizes else 0,
            turned=_uses_rotation_kernel(compute, model.spec),
        )

    def kept(self, tokens: int) -> int:
        """Return the bytes that autograd keeps when the backward pass begins."""
        spec = self.spec
        last_norm = 2 * spec.hidden_size * self.item + self._norm_extra(1)
        rotations = FLOAT * spec.head_dim * (len(spec.ropes) + 1)  # and of layers without positions
        outer_bytes = last_norm + rotations
        if self.checkpointing is True:
            blocks_bytes = spec.num_layers * spec.hidden_size * self.item
            blocks_bytes += spec.layers_with_experts * self._places(tokens)
            return tokens * (outer_bytes + blocks_bytes)
        blocks_bytes = sum(count * self.block(tokens, mixes) for mixes, count in self._kinds)
        recomputed = 0
        if self.fused and not spec.mixture.num_experts and not self._keeps_all_of_mlp:
            layers = spec.num_layers
            num_recomputed = sum(i < self.checkpointing * layers for i in range(layers))
            recomputed = num_recomputed * 2 * spec.intermediate_size * self.item
        return tokens * (outer_bytes + blocks_bytes - recomputed)

    @property
    def _kinds(self) -> list[tuple[bool, int]]:
        mixtures = self.spec.layers_with_experts
        kinds = [(True, mixtures), (False, self.spec.num_layers - mixtures)]
        return [(mixes, count) for mixes, count in kinds if count]

    def block(self, tokens: int, mixes: bool) -> int:
        """Return a block's bytes a token. mixes: it has experts."""
        mlp = self._experts(tokens) if mixes else self._mlp(self.spec.intermediate_size)
        return (
            2 * self.spec.hidden_size * self.item
            + self._norm_extra(len(self.spec.norms))
            + self._norms_after()
            + self._attention()
            + mlp
            + self.item * self.low
        )

    def backward(self, tokens: int) -> int:
        """Return the bytes beside `kept` while a block runs backward."""
        return max(self._block_backward(tokens, mixes) for mixes, _ in self._kinds)

    def _block_backward(self, tokens: int, mixes: bool) -> int:
        if mixes:
            peak = tokens * self.item * self._experts_backward() + self.dense
        else:
            peak = self._mlp_backward(tokens)
        if self.checkpointing is True:  # the block first runs forward again
            peak += tokens * (self.block(tokens, mixes) + self.item * self._not_made_again(mixes))
        return peak

    def _mlp_backward(self, tokens: int) -> int:
        hidden, intermediate = self.spec.hidden_size, self.spec.intermediate_size
        number = tokens * self.item  # bytes of one number a token
        last_norm = 2 * hidden  # already free
        gates_bytes = number * (4 * intermediate + hidden - last_norm)
        product_bytes = number * (2 * intermediate + 2 * hidden) + self.dense
        peak = max(gates_bytes, product_bytes)
        # A share of 1 is not True: all blocks recompute gate and up, one at a time.
        if self.fused and self.checkpointing == 1 and self.checkpointing is not True:
            peak += number * 2 * intermediate
        return peak

    def _not_made_again(self, mixes: bool) -> int:
        """Count the numbers a token that a wholly recomputed block keeps beside `block`."""
        spec = self.spec
        norm_outputs = self._num_pre_norms * spec.hidden_size
        if self._keeps_all_of_mlp or (self.fused and not self.lora):
            return norm_outputs
        return norm_outputs + (spec.mixture.shared_size if mixes else spec.intermediate_size)

    @property
    def _num_pre_norms(self) -> int:
        return sum(norm in IN_FRONT for norm, _ in self.spec.norms)

    @property
    def _keeps_all_of_mlp(self) -> bool:
        return self.spec.activation != "silu"

    def _norms_after(self) -> int:
        keeps_input = self.fused or self.item == FLOAT
        count = len(self.spec.norms) - self._num_pre_norms
        return count * self.spec.hidden_size * self.item if keeps_input else 0

    def _norm_extra(self, norms: int) -> int:
        """Count norms beside x: 1 / rms; in plain torch also x in float32 if it has half precision,
        and x / rms if the weight learns."""
        norm_bytes = FLOAT
        if not self.fused:
            copies = (self.item < FLOAT) + (not self.lora)
            norm_bytes += copies * FLOAT * self.spec.hidden_size
        return norms * norm_bytes

    def _attention(self) -> int:
        spec, item = self.spec, self.item
        if spec.latent is not None:
            return self._latent_attention(spec.latent)
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv_bytes = (q + 2 * kv) * item
        kept_bytes = (2 * q + 2 * kv) * item
        kept_bytes += FLOAT * spec.num_heads  # log-sum-exp
        if self.fused:
            return kept_bytes + qkv_bytes if spec.qk_norm else kept_bytes
        if not self.turned:
            kept_bytes += (q + kv) * item  # qkv without v, which counts as a view
        is_whole = spec.qk_norm == "whole"
        if is_whole and item == FLOAT:
            kept_bytes += qkv_bytes  # inputs of the norms, beside their outputs
        if spec.qk_norm:
            copies = (item < FLOAT) + (not self.lora)  # as `_norm_extra`
            statistics = 2 if is_whole else spec.num_heads + spec.num_kv_heads
            kept_bytes += copies * FLOAT * (q + kv) + FLOAT * statistics
        return kept_bytes

    def _latent_attention(self, sizes: LatentSpec) -> int:
        heads, ranks = self.spec.num_heads, sizes.query_rank + sizes.kv_rank
        numbers = 4 * heads * sizes.head_dim
        if sizes.value_dim < sizes.head_dim:
            numbers += heads * sizes.value_dim  # the output without padding zeros
        keeps_input = self.fused or self.item == FLOAT  # of norms, as in `_norms_after`
        numbers += (1 + keeps_input) * ranks  # inputs of the products, and of the norms
        statistics = heads + 1 + (sizes.query_rank > 0)  # log-sum-exp, 1 / rms
        if not self.fused:  # as `_norm_extra`
            statistics += ((self.item < FLOAT) + (not self.lora)) * ranks
        return numbers * self.item + FLOAT * statistics

    def _mlp(self, mlp_size: int) -> int:
        if self._keeps_all_of_mlp:
            numbers = 4
        else:
            numbers = 2 if self.fused else 3
        return numbers * mlp_size * self.item

    def _experts(self, tokens: int) -> int:
        mixture, hidden, item = self.spec.mixture, self.spec.hidden_size, self.item
        slots, intermediate = mixture.experts_per_token, mixture.expert_size
        kept_bytes = slots * (2 * intermediate + hidden) * item  # gate, up and down's output
        kept_bytes += 2 * FLOAT * slots  # weights
        kept_bytes += self._places(tokens)
        if not self.fused:  # probabilities, and the order of all experts
            scores = 2 if mixture.scores is not None else 3
            kept_bytes += scores * FLOAT * mixture.num_experts
        if not self.fused and mixture.clamped_gate is None:
            kept_bytes += slots * intermediate * item
        if not self.lora and mixture.has_biases:  # the expert of each row, for two biases
            kept_bytes += 2 * slots * 8
        if not self.lora:  # inputs of the products, for the gradients of their weights
            kept_bytes += slots * (hidden + intermediate) * item
        if not self.lora and not self.fused and item < FLOAT:
            kept_bytes += FLOAT * hidden
        if mixture.gates_shared:
            kept_bytes += hidden * item
        return kept_bytes + self._mlp(mixture.shared_size)

    def _places(self, tokens: int) -> int:
        slots = self.spec.mixture.experts_per_token
        uses_int32 = self.fused and tokens * slots <= 1 << 14
        return 2 * slots * (4 if uses_int32 else 8)

    def _experts_backward(self) -> int:
        mixture, hidden = self.spec.mixture, self.spec.hidden_size
        slots, intermediate = mixture.experts_per_token, mixture.expert_size
        input_numbers = hidden + 2 * intermediate
        output_numbers = (2 if self.fused else 4) * hidden  # of the slots' sum
        if not self.lora:
            output_numbers += intermediate
        gate_numbers = 0
        if mixture.clamped_gate is not None:  # gradients, and four float32 tensors
            gate_numbers = (3 + 4 * FLOAT // self.item) * intermediate
        return slots * max(input_numbers, output_numbers, gate_numbers)


def _uses_rotation_kernel(compute: Compute, spec: ModelSpec) -> bool:
    fits_vectors = spec.qk_norm != "head" and spec.head_dim % heads.MULTIPLE == 0
    is_wide = spec.num_heads * spec.head_dim >= heads.LEAST
    float32 = compute.dtype == torch.float32
    return fits_vectors and is_wide and float32 and bool(heads.supports_device(compute.device))


def logits(cfg: RunConfig, compute: Compute, spec: ModelSpec, tokens: int, learns: bool) -> int:
    """Return the peak bytes of log-probs and their gradients, by chunks (`model.logprobs`). learns:
    the lm_head."""
    on_cuda, item = compute.device.type == "cuda", compute.dtype.itemsize
    logit_item = FLOAT if on_cuda else item
    chunk = min(cfg.train.sized().logprob_chunk or 0, tokens)
    chunk_logits = chunk * spec.vocab_size
    chunk_bytes = chunk_logits * (logit_item + item)  # with their gradient
    if not on_cuda:  # float32 logits of some rows, and their product
        copies = 1 if item == FLOAT else 3
        chunk_bytes += copies * FLOAT * min(chunk_logits, max(AT_ONCE, spec.vocab_size))
    hidden_bytes = tokens * spec.hidden_size * item
    if not learns:
        return chunk_bytes + hidden_bytes
    kept_bytes = 0  # gradients of the last chunks' logits
    if on_cuda and item < FLOAT:
        num_chunks = -(-tokens // chunk)
        kept_bytes = min(KEPT, num_chunks) * chunk_logits * item
    head_size = spec.vocab_size * spec.hidden_size
    forward = kept_bytes + chunk_logits * logit_item
    kept_backward = kept_bytes + FLOAT * head_size
    remade_backward = chunk_bytes + (FLOAT + item) * head_size
    return max(forward, kept_backward, remade_backward) + hidden_bytes


def replay(cfg: RunConfig, compute: Compute, spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of replayed caches (`model.evicted_attention`): each key's compaction,
    copies of the tokens before the first one, and gathered keys and values of a group of
    stretches."""
    cache = cfg.rollout.cache
    if not (cfg.train.replay_kv and cache.evicts):
        return 0
    item = compute.dtype.itemsize
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    cache_tokens = caches.policy(cfg).room(0)
    longest = min(spec.max_position, cfg.train.longest)
    # A compaction number takes a byte.
    compactions = tokens * spec.num_kv_heads
    unevicted_tokens = min(tokens, round(tokens * cache_tokens / longest))
    copies = unevicted_tokens * (2 * q + 2 * kv) * item
    stretches = max(1, MOST_MARKED // (spec.num_kv_heads * longest))
    gathered = stretches * cache_tokens * 2 * kv * item
    marks = 3 * 8 * MOST_MARKED
    return spec.num_layers * (compactions + copies) + gathered + marks


def generating(
    cfg: RunConfig, compute: Compute, model: Transformer, prompts: int, samples: int
) -> int:
    """Return the bytes of an engine step. prompts: tokens of one pass; samples: most in flight."""
    dtype = get_format(compute.format(cfg.rollout.weights)).dtype or compute.dtype
    pass_tokens = max(samples, min(MOST_PREFILL, prompts))
    block_bytes = _pass_bytes(model.spec, dtype.itemsize, pass_tokens)
    logits_bytes = 2 * FLOAT * samples * model.spec.vocab_size
    return block_bytes + _dequantized_bytes(cfg, compute, model) + logits_bytes


def _pass_bytes(spec: ModelSpec, item: int, tokens: int) -> int:
    slots, intermediate = spec.mixture.experts_per_token, spec.mixture.expert_size
    mlp = slots * (spec.hidden_size * 2 + intermediate)
    if spec.layers_with_experts < spec.num_layers:
        mlp = max(mlp, (3 if spec.activation == "silu" else 4) * spec.intermediate_size)
    return tokens * item * (3 * spec.hidden_size + max(_head_numbers(spec), mlp))


def _head_numbers(spec: ModelSpec) -> int:
    return 2 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim


def graphs(cfg: RunConfig, compute: Compute, model: Transformer, samples: int) -> int:
    """Return the bytes that graphs keep. Decoding: the largest batch's logits and rows, and q, k, v
    of latent attention, in two pools. Short prompt passes: a block and a dequantized matrix."""
    if compute.device.type != "cuda":
        return 0
    spec = model.spec
    intermediate = spec.mixture.experts_per_token * spec.hidden_size or spec.intermediate_size
    item = compute.dtype.itemsize
    sample_bytes = FLOAT * spec.vocab_size + item * (4 * spec.hidden_size + 3 * intermediate)
    if spec.latent is not None:
        sample_bytes += item * _head_numbers(spec)
    prefill_bytes = _pass_bytes(spec, item, MOST_SHORT) + _dequantized_bytes(cfg, compute, model)
    return 2 * samples * sample_bytes + prefill_bytes


def _dequantized_bytes(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    format = get_format(compute.format(cfg.rollout.weights))
    if compute.device.type != "cuda" or cfg.rollout.keep_dense:
        return 0
    if model.spec.mixture.num_experts:  # kernels read experts' codes
        return 0
    low_bit_linears = [linear for name, linear in model.linears() if format.of(name).bits < 8]
    largest_size = max((prod(linear.weight.shape) for linear in low_bit_linears), default=0)
    return largest_size * torch.bfloat16.itemsize
