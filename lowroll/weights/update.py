"""A weight update as a value: what a learner hands to an engine, wherever the engine is.

    engine.update_weights(WeightUpdate.local(master, version=3, noise=noise))    in one process
    engine.update_weights(WeightUpdate.local(master, version=3).as_stream())     what travels

Every update yields its tensors by name, one after the other and only when asked. A local one also
has the learner's model: an engine of the same process quantizes from there into its own storages
(`weights.publish`) and reads no name. Every other engine consumes the stream.

The digest is of names and bytes, wherever they are: the learner states it, and the engine computes
it again over what has arrived (`weights.receive`), or over a file. It is not the digest in a
BehaviorTag, which is that of the quantized weights that the engine samples from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from lowroll.model import hf, lora, scaling
from lowroll.model.names import hf_names, part_rows
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, get_format
from lowroll.weights.changes import Changes
from lowroll.weights.noise import Noise
from lowroll.weights.publish import fingerprint

Kind = Literal["full", "adapter", "codes"]


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """The weights of policy `version`."""

    version: int
    # full: every weight, dense, under its Hugging Face name. adapter: A and B of LoRA under PEFT's
    # names, for the base that the engine holds. codes: the stored tensors of a low-bit model, or
    # with `changes` what differs in them (`weights.changes`).
    kind: Kind
    # begins the stream anew; what it has yielded stays as it is until the update has been taken
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    digest: str | None = None  # of the stream (`content_digest`), where it was stated
    noise: Noise | None = None  # for the norms; the engine draws it itself
    lora_alpha: float | None = None  # of an adapter; its rank is in the shapes
    # the s of update-aware scaling (`model.scaling`) that the weights, or an adapter's base, carry
    input_scale: float = 1.0
    # the learner's model, in its own process: read when the update is taken, not before
    master: Transformer | None = None
    changes: Changes | None = None

    @classmethod
    def local(cls, master: Transformer, version: int, noise: Noise | None = None) -> WeightUpdate:
        """Return the update from a learner of this process: its adapter when it has one, else its
        weights. Nothing is read yet."""
        alphas = {linear.adapter.alpha for _, linear in master.linears() if linear.adapter}
        scale = scaling.applied(master) or 1.0
        if alphas:
            alpha = alphas.pop() if len(alphas) == 1 else None  # an engine says which layer is odd
            stream = partial(_adapter, master)
            return cls(version, "adapter", stream, None, noise, alpha, scale, master)
        kept = master.weight_format
        if kept is not None and not get_format(kept).dense:
            return cls(version, "codes", partial(_codes, master), None, noise, None, scale, master)
        return cls(version, "full", partial(dense, master), None, noise, None, scale, master)

    def as_stream(self) -> WeightUpdate:
        """Return the same update as it travels: with its digest and without the learner's model."""
        return replace(self, digest=self.content_digest(), master=None)

    def content_digest(self) -> str:
        """Return 32 hex digits over the name, shape, dtype and bytes of every tensor, and over what
        else changes the policy. Reads the whole stream."""
        numbers = {} if self.lora_alpha is None else {"lora_alpha": self.lora_alpha}
        return fingerprint(dict(self.tensors()), numbers | {"input_scale": self.input_scale})


def dense(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a dense model under its Hugging Face name: views of the fused
    matrices."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    for name, linear in model.linears():
        if isinstance(linear.weight, QTensor):
            weights[f"{name}.weight"] = linear.weight.tensors["weight"]
    for name, parts, shape in hf_names(model.spec):
        rows = [part_rows(model.spec, part, shape[0]) for part in parts]
        yield from zip(parts, weights[name].detach().split(rows), strict=True)


def _adapter(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    yield from lora.state(model).items()


def _codes(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    yield from hf.state(model).items()
