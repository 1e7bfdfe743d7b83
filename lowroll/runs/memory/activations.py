"""The memory of a learner's pass, by arithmetic on a block's shapes: what autograd keeps, tensor by
tensor, and temporary bytes. A test counts the real tensors.

On CUDA the kernels keep less than plain torch (`fused`); norms and SwiGLU's output are recomputed
(`model.recompute`).

    stream      x after each addition of the block, twice D; two statistics of the norms; what a
                norm after attention or MLP reads
    attention   q, k, v as rotated, the output and its log-sum-exp; qkv too where heads are normed,
                or where a view of it is kept
    dense MLP   gate and up, 2F; in plain torch silu(gate) too; of GELU, which is not recomputed,
                gate, up, gelu(gate) and their product
    experts     gate and up of every slot, what down gives, weights and places of the slots; the
                shared expert is a dense MLP, and keeps what it gives if it has a gate
    low rank    l of every adapter

Not counted: masks of windows without flash attention, on a CPU and in float32.

Legend: T tokens, D hidden size, q = H d, kv = G d, F intermediate size, S choices a token, V
vocabulary, C rows of logits at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from lowroll.config import RunConfig
from lowroll.kernels.fused import avx2 as heads
from lowroll.kernels.training.logprobs import AT_ONCE
from lowroll.model.families.base import PRE_NORMS
from lowroll.model.logprobs import KEPT
from lowroll.model.replay import MOST_MARKED
from lowroll.model.spec import ModelSpec
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.runs.assembly import caches
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.memory.weights import adapted, largest

FLOAT = 4
IN_FRONT = [norm for norm, _ in PRE_NORMS]
MOST_PREFILL = 8192  # prompt tokens of a pass (`engine.native`)
MOST_SHORT = 1024  # of a pass that is a graph (`engine.prefill_graphs`)


@dataclass(frozen=True)
class Learning:
    """What decides how much of a token a block keeps. low: columns of l, by layer."""

    spec: ModelSpec
    item: int
    fused: bool
    lora: bool
    low: dict[str, int]
    checkpointing: bool | float
    dense: int  # bytes of the largest matrix dequantized for a product; 0: none
    turned: bool = False  # a CPU kernel rotates heads and copies v

    @classmethod
    def of(cls, cfg: RunConfig, compute: Compute, model: Transformer) -> Learning:
        """Return a run's learner. model: its shapes."""
        train, low = cfg.train, dict.fromkeys(("qkv", "o", "gate_up", "down"), 0)
        for name, linear in model.linears():
            kind = name.rpartition(".")[2]
            low[kind] = train.lora_rank * len(adapted(cfg, linear))
        codes = not get_format(compute.format(cfg.forward_weights or cfg.rollout.weights)).dense
        codes = codes and (train.lora or train.forward != "dense")
        return cls(
            model.spec,
            compute.dtype.itemsize,
            compute.device.type == "cuda",
            train.lora,
            low,
            train.sized().activation_checkpointing or False,
            largest(model) * compute.dtype.itemsize if codes else 0,
            _uses_rotation_kernel(compute, model.spec),
        )

    def kept(self, tokens: int) -> int:
        """Return the bytes when a micro-batch's backward pass begins."""
        spec = self.spec
        outer_bytes = (
            (2 * spec.hidden_size) * self.item
            + self._norm_extra(1)
            + FLOAT * spec.head_dim * (len(spec.ropes) + 1)  # and of layers without positions
        )
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
        """Whether a kind of block has experts, and the number of such blocks."""
        mixtures = self.spec.layers_with_experts
        kinds = [(True, mixtures), (False, self.spec.num_layers - mixtures)]
        return [(mixes, count) for mixes, count in kinds if count]

    def block(self, tokens: int, mixes: bool) -> int:
        """Return the bytes of a token in a block, with experts if it `mixes`."""
        mlp = self._experts(tokens) if mixes else self._mlp(self.spec.intermediate_size)
        return (
            2 * self.spec.hidden_size * self.item
            + self._norm_extra(len(self.spec.norms))
            + self._norms_after()
            + self._attention()
            + mlp
            + self.item * sum(self.low.values())
        )

    def backward(self, tokens: int) -> int:
        """Return the bytes beside `kept` while a block runs backward."""
        return max(self._block_backward(tokens, mixes) for mixes, _ in self._kinds)

    def _block_backward(self, tokens: int, mixes: bool) -> int:
        spec, item = self.spec, self.item
        if mixes:
            peak = tokens * item * self._experts_backward() + self.dense
        else:
            intermediate = spec.intermediate_size
            gates = 4 * intermediate + spec.hidden_size
            product = 2 * intermediate + 2 * spec.hidden_size
            already_read = 2 * spec.hidden_size  # the last norm's part of `kept`
            peak = max(tokens * item * (gates - already_read), tokens * item * product + self.dense)
            if self.fused and self.checkpointing == 1 and self.checkpointing is not True:
                peak += tokens * item * 2 * intermediate
        if self.checkpointing is True:
            peak += tokens * (self.block(tokens, mixes) + item * self._not_made_again(mixes))
        return peak

    def _not_made_again(self, mixes: bool) -> int:
        """Return how many more numbers of a token are kept without recomputation."""
        spec = self.spec
        is_kept_anyway = self._keeps_all_of_mlp or (self.fused and not self.lora)
        mlp_size = spec.mixture.shared_size if mixes else spec.intermediate_size
        return self._num_pre_norms * spec.hidden_size + (0 if is_kept_anyway else mlp_size)

    @property
    def _num_pre_norms(self) -> int:
        return sum(norm in IN_FRONT for norm, _ in self.spec.norms)

    @property
    def _keeps_all_of_mlp(self) -> bool:
        return self.spec.activation != "silu"

    def _norms_after(self) -> int:
        """Return the bytes of what norms after attention and MLP read."""
        keeps_input = self.fused or self.item == FLOAT
        count = len(self.spec.norms) - self._num_pre_norms
        return count * self.spec.hidden_size * self.item if keeps_input else 0

    def _norm_extra(self, norms: int) -> int:
        """Return the bytes of norms beside x: 1 / rms; in plain torch the float32 x of half
        precision, and x / rms where the weight learns."""
        norm_bytes = FLOAT
        if not self.fused:
            copies = (self.item < FLOAT) + (not self.lora)
            norm_bytes += copies * FLOAT * self.spec.hidden_size
        return norms * norm_bytes

    def _attention(self) -> int:
        spec, item = self.spec, self.item
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        kept_bytes = (2 * q + 2 * kv) * item + FLOAT * spec.num_heads
        if self.fused:
            return kept_bytes + ((q + 2 * kv) * item if spec.qk_norm else 0)
        if not self.turned:
            kept_bytes += (q + kv) * item  # qkv, because v is a view of it
        is_whole = spec.qk_norm == "whole"
        if is_whole and item == FLOAT:
            kept_bytes += (q + 2 * kv) * item  # what the norms read, beside what they give
        if spec.qk_norm:
            copies = (item < FLOAT) + (not self.lora)
            statistics = 2 if is_whole else spec.num_heads + spec.num_kv_heads
            kept_bytes += copies * FLOAT * (q + kv) + FLOAT * statistics
        return kept_bytes

    def _mlp(self, mlp_size: int) -> int:
        numbers = 4 if self._keeps_all_of_mlp else 2 if self.fused else 3
        return numbers * mlp_size * self.item

    def _experts(self, tokens: int) -> int:
        mixture, hidden, item = self.spec.mixture, self.spec.hidden_size, self.item
        slots, intermediate = mixture.experts_per_token, mixture.expert_size
        kept_bytes = (
            slots * (2 * intermediate + hidden) * item + 2 * FLOAT * slots + self._places(tokens)
        )
        if not self.fused:  # probabilities, and the order of all experts
            scores = 2 if mixture.scores is not None else 3
            kept_bytes += scores * FLOAT * mixture.num_experts
        if not self.fused and mixture.clamped_gate is None:  # silu(gate)
            kept_bytes += slots * intermediate * item
        if not self.lora and mixture.has_biases:  # the expert of each row, for two biases
            kept_bytes += 2 * slots * 8
        if not self.lora:
            kept_bytes += slots * (hidden + intermediate) * item
            kept_bytes += FLOAT * hidden if item < FLOAT and not self.fused else 0
        kept_bytes += hidden * item if mixture.gates_shared else 0
        return kept_bytes + self._mlp(mixture.shared_size)

    def _places(self, tokens: int) -> int:
        """Return the bytes of a token's slot indices, by place and by slot."""
        slots = self.spec.mixture.experts_per_token
        uses_int32 = self.fused and tokens * slots <= 1 << 14
        return 2 * slots * (4 if uses_int32 else 8)

    def _experts_backward(self) -> int:
        """Return the numbers of a token in the gradients of the slots' inputs, gates and
        outputs."""
        mixture, hidden = self.spec.mixture, self.spec.hidden_size
        slots, intermediate = mixture.experts_per_token, mixture.expert_size
        output_numbers = (2 if self.fused else 4) * hidden  # of the slots' sum
        gate_numbers = 0
        if mixture.clamped_gate is not None:  # gradients, and four tensors in float32
            gate_numbers = (3 + 4 * FLOAT // self.item) * intermediate
        return slots * max(
            hidden + 2 * intermediate,
            output_numbers + (0 if self.lora else intermediate),
            gate_numbers,
        )


def _uses_rotation_kernel(compute: Compute, spec: ModelSpec) -> bool:
    fits_vectors = spec.qk_norm != "head" and spec.head_dim % heads.MULTIPLE == 0
    is_wide = spec.num_heads * spec.head_dim >= heads.LEAST
    float32 = compute.dtype == torch.float32
    return fits_vectors and is_wide and float32 and bool(heads.supports_device(compute.device))


def logits(cfg: RunConfig, compute: Compute, spec: ModelSpec, tokens: int, learns: bool) -> int:
    """Return the bytes of log-probs and gradients, chunk by chunk (`model.logprobs`). learns:
    whether the lm_head does."""
    chunk = min(cfg.train.sized().logprob_chunk or 0, tokens)
    item = compute.dtype.itemsize
    logit_bytes = FLOAT if compute.device.type == "cuda" else item
    rows = chunk * spec.vocab_size
    chunk_bytes = rows * (logit_bytes + item)
    if compute.device.type != "cuda":  # float32 logits of some rows, and their product
        copies = 1 if item == FLOAT else 3
        chunk_bytes += copies * FLOAT * min(rows, max(AT_ONCE, spec.vocab_size))
    hidden = tokens * spec.hidden_size * item
    if not learns:
        return chunk_bytes + hidden
    head = spec.vocab_size * spec.hidden_size
    kept_bytes = 0
    if compute.device.type == "cuda" and item < FLOAT:
        kept_bytes = min(KEPT, -(-tokens // chunk)) * rows * item
    forward = kept_bytes + rows * logit_bytes
    return max(forward, kept_bytes + FLOAT * head, chunk_bytes + (FLOAT + item) * head) + hidden


def replay(cfg: RunConfig, compute: Compute, spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of replayed caches (`model.replay`): which compaction dropped each key,
    copies of what precedes the first, and a portion's gathered keys and values."""
    cache = cfg.rollout.cache
    if not (cfg.train.replay_kv and cache.evicts):
        return 0
    policy, item = caches.policy(cfg), compute.dtype.itemsize
    cache_tokens = policy.room(0)
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    longest = min(spec.max_position, cfg.train.longest)
    portions = max(1, MOST_MARKED // (spec.num_kv_heads * longest))
    unevicted_tokens = min(tokens, round(tokens * cache_tokens / longest))
    return (
        spec.num_layers * (tokens * spec.num_kv_heads + unevicted_tokens * (2 * q + 2 * kv) * item)
        + portions * cache_tokens * 2 * kv * item
        + 3 * 8 * MOST_MARKED
    )


def generating(
    cfg: RunConfig, compute: Compute, model: Transformer, prompts: int, samples: int
) -> int:
    """Return the bytes of an engine step: its prompts in one pass, and the logits of new samples.
    prompts: tokens; samples: the most in flight."""
    item = (get_format(compute.format(cfg.rollout.weights)).dtype or compute.dtype).itemsize
    block = _pass_bytes(model.spec, item, max(samples, min(MOST_PREFILL, prompts)))
    return (
        block
        + _dequantized_bytes(cfg, compute, model)
        + 2 * FLOAT * samples * model.spec.vocab_size
    )


def _pass_bytes(spec: ModelSpec, item: int, tokens: int) -> int:
    """Return the temporary bytes of a block in a forward pass."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    slots, intermediate = spec.mixture.experts_per_token, spec.mixture.expert_size
    mlp = slots * (spec.hidden_size * 2 + intermediate)
    if spec.layers_with_experts < spec.num_layers:
        mlp = max(mlp, (3 if spec.activation == "silu" else 4) * spec.intermediate_size)
    return tokens * item * (3 * spec.hidden_size + max(2 * heads, mlp))


def graphs(cfg: RunConfig, compute: Compute, model: Transformer, samples: int) -> int:
    """Return the bytes that graphs keep between steps. Decoding: the largest batch's logits and
    rows, in two pools. Short prompt passes: a block's, with a dequantized matrix."""
    if compute.device.type != "cuda":
        return 0
    spec = model.spec
    intermediate = spec.mixture.experts_per_token * spec.hidden_size or spec.intermediate_size
    item = compute.dtype.itemsize
    sample_bytes = FLOAT * spec.vocab_size + item * (4 * spec.hidden_size + 3 * intermediate)
    prefill_bytes = _pass_bytes(spec, item, MOST_SHORT) + _dequantized_bytes(cfg, compute, model)
    return 2 * samples * sample_bytes + prefill_bytes


def _dequantized_bytes(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Return the bytes of the matrix that the engine dequantizes for many rows."""
    format = get_format(compute.format(cfg.rollout.weights))
    if compute.device.type != "cuda" or cfg.rollout.keep_dense:
        return 0
    if model.spec.mixture.num_experts:  # kernels read experts' codes
        return 0
    low_bit_linears = [linear for name, linear in model.linears() if format.of(name).bits < 8]
    largest_size = max((prod(linear.weight.shape) for linear in low_bit_linears), default=0)
    return largest_size * torch.bfloat16.itemsize
