"""Attention over packed groups: a prompt, then the responses that share it, each of which sees the
prompt and itself.

A prompt is fed once for all its responses ("Prefix Grouper", arXiv 2506.05433). Attention of a
response joins two parts, each with its own log-sum-exp:

    lse = log(exp(lse_own) + exp(lse_prompt)),    o = sum over both parts of o_part exp(lse_part - lse)

A part's backward pass, given o and lse, has the probabilities exp(s - lse) of the whole softmax (as
with sinks, `model.flash`), so its gradients are exact and those of both parts add up.

Exact learners take the engine's values and the gradient of these parts.

Legend: `model.flash`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels.batch_invariant import attention as invariant
from lowroll.model import flash
from lowroll.model.attention import (
    Attend,
    AttentionInputs,
    bounds_of,
    exactly,
    ranges,
    upload,
)
from lowroll.model.spec import ModelSpec


class PromptGroup(NamedTuple):
    """A prompt's number of tokens, and those fed of each of its responses."""

    prompt: int
    responses: tuple[int, ...]


def obstacle(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str:
    """Return why such a model cannot share prompts, or an empty string."""
    if spec.delta is not None:
        return "recurrent layers have one state a sequence"
    if any(spec.windows):
        return "windows count from each response's own tokens"
    if device.type == "cuda" and not flash.flashes(dtype, spec.head_dim):
        return f"flash attention takes no heads of {spec.head_dim} in {dtype}"
    return ""


class _Place(NamedTuple):
    """A group's rows: the prompt, then the responses one after the other."""

    start: int
    group: PromptGroup

    @property
    def first_response(self) -> int:
        return self.start + self.group.prompt

    @property
    def stop(self) -> int:
        return self.first_response + sum(self.group.responses)


def _places(groups: Sequence[PromptGroup]) -> Iterator[_Place]:
    start = 0
    for group in groups:
        place = _Place(start, group)
        yield place
        start = place.stop


def grouped(groups: Sequence[PromptGroup], device: torch.device | str = "cpu") -> Attend:
    """Return causal attention over packed groups: a prompt's tokens, then those of each of its
    responses. On CUDA for heads that `flash.flashes` takes."""
    on_cuda = torch.device(device).type == "cuda"
    kernel = _Joined(list((_parts_on_cuda if on_cuda else _parts_on_cpu)(groups, device)))

    def attend(layer: int, inputs: AttentionInputs) -> Tensor:
        return flash.attend_packed(*inputs, kernel)

    return attend


def exact_grouped(groups: Sequence[PromptGroup], device: torch.device | str = "cpu") -> Attend:
    """Return `grouped` with the engine's bits."""
    return exactly(_listed(groups, device), grouped(groups, device))


def _listed(groups: Sequence[PromptGroup], device: torch.device | str) -> invariant.Causal:
    """Return attention of prompts and responses over lists of whole sequences."""
    sequences: list[tuple[int, int]] = []  # (start, size) of prompts and responses in turn
    pieces: list[tuple[int, int, int]] = []  # queries, keys before them, start of the sequence
    start = 0
    for place in _places(groups):
        prompt, at = place.group.prompt, place.first_response
        pieces.append((prompt, 0, start))  # the prompt is in front of the first response, too
        for length in place.group.responses:
            sequences += [(place.start, prompt), (at, length)]
            pieces.append((length, prompt, start))
            start, at = start + prompt + length, at + length
    fed = torch.tensor([piece for piece in pieces if piece[0]], dtype=torch.int32)
    lengths_S, before_S, starts_S = upload(fed.T.contiguous(), device)
    tokens_L = upload(ranges(sequences).int(), device)
    tokens = sum(length for length, _, _ in pieces)
    return invariant.listed(tokens_L, lengths_S, before_S, starts_S, tokens)


Rows = slice | Tensor | tuple[None, slice]  # the last: as a batch of one sequence


class _Part(NamedTuple):
    """Queries and those of their keys that a kernel attends to. No row stands twice."""

    queries: Rows
    keys: Rows
    kernel: flash.AttentionKernel


def _parts_on_cpu(groups: Sequence[PromptGroup], device: torch.device | str) -> Iterator[_Part]:
    causal, unmasked = flash.Masked(), flash.Masked(is_causal=False)
    for place in _places(groups):
        start = place.start
        for length in (place.group.prompt, *filter(None, place.group.responses)):
            own = (None, slice(start, start + length))
            yield _Part(own, own, causal)
            start += length
        if place.stop > place.first_response:
            responses = (None, slice(place.first_response, place.stop))
            prompt = (None, slice(place.start, place.first_response))
            yield _Part(responses, prompt, unmasked)


def _parts_on_cuda(groups: Sequence[PromptGroup], device: torch.device | str) -> Iterator[_Part]:
    lengths = [n for prompt, responses in groups for n in (prompt, *responses) if n]
    bounds, longest = bounds_of(lengths, device), max(lengths)
    everything = slice(None)
    yield _Part(everything, everything, flash.Packed(bounds, longest, bounds, longest))
    places = [place for place in _places(groups) if place.stop > place.first_response]
    if not places:
        return
    prompts = [(place.start, place.group.prompt) for place in places]
    responses = [(place.first_response, place.stop - place.first_response) for place in places]
    sizes = [[size for _, size in spans] for spans in (responses, prompts)]
    q_bounds, k_bounds = (bounds_of(size, device) for size in sizes)
    packed = flash.Packed(q_bounds, max(sizes[0]), k_bounds, max(sizes[1]), is_causal=False)
    yield _Part(upload(ranges(responses), device), upload(ranges(prompts), device), packed)


@dataclass(frozen=True)
class _Joined:
    """The attention kernel that joins parts."""

    parts: Sequence[_Part]

    def forward(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> tuple[Tensor, Tensor]:
        o_THd = torch.zeros_like(q_THd, dtype=torch.float32)
        lse_TH = o_THd.new_full(q_THd.shape[:2], -torch.inf)
        for queries, keys, kernel in self.parts:
            o_CHd, lse_CH = kernel.forward(q_THd[queries], k_TGd[keys], v_TGd[keys])
            joined_CH = torch.logaddexp(lse_TH[queries], lse_CH)
            share_CH, before_CH = (lse_CH - joined_CH).exp(), (lse_TH[queries] - joined_CH).exp()
            o_THd[queries] = o_THd[queries] * before_CH[..., None] + o_CHd * share_CH[..., None]
            lse_TH[queries] = joined_CH
        return o_THd.to(q_THd.dtype), lse_TH

    def backward(
        self,
        grad_THd: Tensor,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGd: Tensor,
        o_THd: Tensor,
        lse_TH: Tensor,
    ) -> flash.Gradients:
        q_grad_THd, k_grad_TGd, v_grad_TGd = (torch.zeros_like(x) for x in (q_THd, k_TGd, v_TGd))
        for queries, keys, kernel in self.parts:
            q_CHd, k_SGd, v_SGd = kernel.backward(
                grad_THd[queries],
                q_THd[queries],
                k_TGd[keys],
                v_TGd[keys],
                o_THd[queries],
                lse_TH[queries],
            )
            q_grad_THd[queries] += q_CHd
            k_grad_TGd[keys] += k_SGd
            v_grad_TGd[keys] += v_SGd
        return q_grad_THd, k_grad_TGd, v_grad_TGd
