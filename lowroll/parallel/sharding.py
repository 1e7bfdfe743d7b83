"""Models in parts: every rank holds some rows of each weight, its gradient and its moments (FSDP2).

    ranks = Sharded(rank, size, host, port, device, deadline_s)
    ranks.shard(model)

`fully_shard` is applied to each block and to the model. A pass gathers a block's weights before it runs
and frees them after it; gradients are reduced in float32 to the ranks that hold the rows. So every pass
needs all ranks (`lockstep`).

    learning weights   float32 master parts, which passes read rounded to the model's dtype
    frozen weights     parts in the model's dtype: a reference, a teacher, the base of an adapter
    adapters           whole on every rank (data parallel)
    codes              of an aligned forward and of transposes: whole on every rank, made again block
                       by block from gathered weights

The model's own parameters (embedding, norm, lm_head) stay gathered from a pass to the update, since
log-probs read lm_head outside of the model's call; `forget` frees them.

A digest, a publication and a saved folder read a `mirror`: a plain model on the rank that leads,
refilled block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lowroll.model.linear import Linear
from lowroll.model.transformer import Block, Transformer
from lowroll.parallel.ranks import RankGroup, rows_of
from lowroll.quant.dense import over
from lowroll.quant.formats import QTensor, get_format

PIECES = [1 << i for i in range(28, 36)]  # bytes of page-locked memory that are asked for at once
PLACE = 256  # bytes: what lies in a piece begins at multiples of it


class Sharded(RankGroup):
    """This process among those that hold a model together. Arguments as `RankGroup`'s.

    A model on the host moves to the ranks' device block by block. It must be scaled, aligned and have
    its adapter before. `shard` raises ValueError for low-bit weights, before anything changes.
    """

    lockstep = True

    @cached_property
    def _mesh(self) -> DeviceMesh:
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, self.device.type)

    @cached_property
    def _models(self) -> list[Transformer]:
        return []

    @cached_property
    def _dtypes(self) -> dict[int, torch.dtype]:
        """The dtypes in which passes read the parts, by the parameter's id."""
        return {}

    @cached_property
    def _named(self) -> set[Linear]:
        """Layers whose matrix was under the name of a format."""
        return set()

    def shard(self, model: Transformer) -> Transformer:
        _refuse(model)
        dtype = model.dtype
        whole = set()
        for _, linear in model.linears():
            if isinstance(linear.weight, QTensor):  # a matrix under the name of a format
                matrix = linear.weight.tensors["weight"]
                _set_weight(linear, nn.Parameter(matrix, requires_grad=False))
                self._named.add(linear)
            if linear.adapter is not None:
                whole |= set(linear.adapter.to(self.device).parameters())
        for module in (*model.blocks, model):
            learning = []
            for p in module.parameters():
                if p.requires_grad and p not in whole and not isinstance(p, DTensor):
                    p.data = p.data.float()
                    learning.append(p)
            policy = MixedPrecisionPolicy(
                param_dtype=dtype if learning else None,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
            fully_shard(module, mesh=self._mesh, mp_policy=policy, ignored_params=whole)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._dtypes.update((id(p), dtype) for p in model.parameters())
        self._models.append(model)
        model.read_blocks = self._read_blocks
        return model

    def forget(self) -> None:
        for model in self._models:
            assert isinstance(model, FSDPModule)
            model.reshard()

    def is_part(self, p: Tensor) -> bool:
        return isinstance(p, DTensor)

    @torch.no_grad()
    def part(self, p: Tensor) -> Tensor:
        return p.to_local().detach() if isinstance(p, DTensor) else p

    def cut(self, whole: Tensor, p: Tensor) -> Tensor:
        if not isinstance(p, DTensor):
            return super().cut(whole, p)
        return whole[rows_of(self.rank, self.size, len(p))]

    def dtype(self, p: Tensor) -> torch.dtype:
        return self._dtypes.get(id(p), p.dtype)

    def total(self, squares: Tensor) -> Tensor:
        squares = squares.clone()
        with self._together("the norm"):
            dist.all_reduce(squares)
        return squares

    def on_whole(
        self, work: Callable[[int, Tensor], Tensor], parts: Sequence[Tensor], heights: Sequence[int]
    ) -> list[Tensor]:
        """Give matrix i to rank i."""
        sizes = [part.numel() for part in parts] + [0] * (self.size - len(parts))
        mine = self.rank < len(parts)
        counts = [0] * self.size
        if mine:
            width = parts[self.rank].shape[1]
            rows = (rows_of(r, self.size, heights[self.rank]) for r in range(self.size))
            counts = [(one.stop - one.start) * width for one in rows]
        sent = torch.cat([part.flatten() for part in parts])
        whole = sent.new_empty(sum(counts))
        with self._together("matrices to those who work on them"):
            dist.all_to_all_single(whole, sent, counts, sizes)
        if mine:
            whole = work(self.rank, whole.view(-1, width)).flatten()
        with self._together("matrices that come back"):
            dist.all_to_all_single(sent, whole, sizes, counts)
        back = sent.split(sizes[: len(parts)])
        return [piece.view_as(part) for piece, part in zip(back, parts, strict=True)]

    def mirror(self, model: Transformer, device: torch.device | str = "cpu") -> Transformer | None:
        """Return the whole model, frozen and in its dtype, on the rank that leads, else None. Its
        adapters and codes are the model's own."""
        made = None
        if self.leads:
            dtype = self.dtype(next(model.parameters()))
            made = Transformer(model.spec, device, dtype).requires_grad_(False)
            if self.device.type == "cuda" and torch.device(device).type == "cpu":
                _pin(list(made.parameters()))
            for (_, ours), (_, theirs) in zip(made.linears(), model.linears(), strict=True):
                ours.adapter, ours.aligned = theirs.adapter, theirs.aligned
        self._copy(made, model, [*model.blocks, model])
        if made is not None:
            self._name(made, model)
        return made

    def _name(self, mirror: Transformer, model: Transformer) -> None:
        """Restore the formats of matrices that had the name of one."""
        for (_, ours), (_, theirs) in zip(mirror.linears(), model.linears(), strict=True):
            if theirs in self._named and isinstance(ours.weight, Tensor):
                named = over(ours.weight)
                assert named is not None, "plain floating point has a name"
                _set_weight(ours, named)

    def refill(self, mirror: Transformer | None, model: Transformer) -> None:
        """Refill block by block what is trained."""
        self._copy(mirror, model, [m for m in (*model.blocks, model) if _learns(m)])

    @torch.no_grad()
    def _copy(
        self, mirror: Transformer | None, model: Transformer, modules: list[nn.Module]
    ) -> None:
        self.forget()
        targets = {} if mirror is None else dict(mirror.named_parameters())
        for module in modules:
            prefix = f"blocks.{module.layer}." if isinstance(module, Block) else ""
            with _gathered(module):
                for name, p in module.named_parameters():
                    if not isinstance(p, DTensor) and prefix + name in targets:
                        target = targets[prefix + name]
                        if target is not p:
                            target.copy_(p, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _read_blocks(self, model: Transformer) -> Iterator[list[Block]]:
        for block in model.blocks:
            assert isinstance(block, Block)
            with _gathered(block):
                yield [block]


def pieces(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the layout of tensors of these bytes in page-locked memory: the bytes of each piece, and
    the offsets of its tensors, in their order.

    torch rounds a request for such memory up to a power of two: the matrices of a 7B, a 14B and a 32B
    model would take 1.8 to 1.9 times their bytes one by one, and take at most a seventh more in the
    pieces that round least.
    """
    return min((_pieces(sizes, most) for most in PIECES), key=rounded)


def rounded(found: Sequence[tuple[int, list[int]]]) -> int:
    """Return the bytes that torch takes for such pieces."""
    return sum(1 << max(0, nbytes - 1).bit_length() for nbytes, _ in found)


def _pieces(sizes: Sequence[int], most: int) -> list[tuple[int, list[int]]]:
    """Return pieces of at most `most` bytes, except for larger tensors."""
    found: list[tuple[int, list[int]]] = []
    for size in sizes:
        if not found or found[-1][0] + size > most:
            found.append((0, []))
        end, starts = found[-1]
        found[-1] = -(-(end + size) // PLACE) * PLACE, [*starts, end]
    return found


def _pin(parameters: Sequence[nn.Parameter], pinned: bool = True) -> None:
    """Move parameters of a CPU to page-locked memory. What they hold is lost."""
    rest = iter(parameters)
    for nbytes, starts in pieces([p.nbytes for p in parameters]):
        piece = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        for start, p in zip(starts, rest, strict=False):
            p.data = piece[start : start + p.nbytes].view(p.dtype).view(p.shape)


@contextmanager
def _gathered(module: nn.Module) -> Iterator[None]:
    """Gather a module's own parameters inside the block."""
    assert isinstance(module, FSDPModule)
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def _set_weight(linear: Linear, weight: QTensor | nn.Parameter) -> None:
    """Set the same matrix in another form; the codes beside it stay."""
    codes = linear.aligned, linear.transposed
    linear.set_weight(weight)
    linear.aligned, linear.transposed = codes


def _learns(module: nn.Module) -> bool:
    """Return whether the module has a sharded parameter that is trained."""
    return any(p.requires_grad and isinstance(p, DTensor) for p in module.parameters())


def _refuse(model: Transformer) -> None:
    """Raise ValueError for what cannot be held in parts."""
    for name, linear in model.linears():
        weight = linear.weight
        if not isinstance(weight, QTensor):
            continue
        if not get_format(weight.format).dense or weight.tensors["weight"].dtype != model.dtype:
            raise ValueError(
                f"train.sharding: full: {name} is {weight.format} under {model.dtype}, which stays "
                "whole; write train.sharding: none (every GPU has the base, all learn the adapter)"
            )
