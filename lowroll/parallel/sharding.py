"""Sharded models: every rank holds some rows of each weight, its gradient and its moments (FSDP2).

A pass gathers a block's weights before it runs and frees them after it; gradients are reduced in
float32 to the shards. So every pass needs all ranks (`lockstep`).

    learning weights   float32 shards are the masters, which passes read in the model's dtype
    frozen weights     shards in the model's dtype: a reference, a teacher, the base of an adapter
    adapters           whole on every rank: they are small
    corrections        of routers: whole on every rank, in float32
    codes              of aligned forwards and transposes: whole on every rank, renewed by block

The model's own parameters (embedding, norm, lm_head) stay gathered from a pass to the update, since
log-probs read lm_head outside of the model's call; `forget` drops them before the next pass.
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
from lowroll.model.names import is_fixed
from lowroll.model.transformer import Block, Transformer
from lowroll.parallel.ranks import RankGroup, rows_of
from lowroll.quant.dense import over
from lowroll.quant.formats import QTensor, get_format

PIECES = [1 << i for i in range(28, 36)]  # bytes: sizes of page-locked allocations
PLACE = 256  # bytes: alignment within a piece


class Sharded(RankGroup):
    """One process of a group that shards a model.

    Shards are on the ranks' device; a model on the host is moved by block. Scale, align and adapt a
    model first.
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
        """The dtypes in which passes read the shards, by the parameter's id; the models keep them
        alive."""
        return {}

    @cached_property
    def _named(self) -> set[Linear]:
        return set()

    def shard(self, model: Transformer) -> Transformer:
        """Replace the model's parameters by this rank's shards. ValueError for low-bit weights,
        before anything changes."""
        _check_not_low_bit(model)
        dtype = model.dtype
        self._unwrap_dense(model)
        whole_parameters = self._keep_whole(model)
        # blocks first: the model then takes what is left
        for module in (*model.blocks, model):
            learning_parameters = []
            for p in module.parameters():
                if p.requires_grad and p not in whole_parameters and not isinstance(p, DTensor):
                    p.data = p.data.float()
                    learning_parameters.append(p)
            policy = MixedPrecisionPolicy(
                param_dtype=dtype if learning_parameters else None,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
            fully_shard(module, mesh=self._mesh, mp_policy=policy, ignored_params=whole_parameters)
            assert isinstance(module, FSDPModule)
            # gradients are sums over the ranks, not means
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._dtypes.update((id(p), dtype) for p in model.parameters())
        self._models.append(model)
        model.read_blocks = self._read_blocks
        return model

    def _unwrap_dense(self, model: Transformer) -> None:
        for _, linear in model.linears():
            if isinstance(linear.weight, QTensor):
                matrix = linear.weight.tensors["weight"]
                _set_weight(linear, nn.Parameter(matrix, requires_grad=False))
                self._named.add(linear)

    def _keep_whole(self, model: Transformer) -> set[nn.Parameter]:
        whole_parameters: set[nn.Parameter] = set()
        for _, linear in model.linears():
            if linear.adapter is not None:
                whole_parameters |= set(linear.adapter.to(self.device).parameters())
        for name, p in model.named_parameters():
            if is_fixed(name):  # passes would read a part in the model's dtype
                p.data = p.data.to(self.device)
                whole_parameters.add(p)
        return whole_parameters

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
        """Give matrix i to rank i, in pieces from all ranks; it comes back in pieces."""
        # entries exchanged with each rank: of this rank's shards, and of its own matrix
        shard_sizes = [part.numel() for part in parts] + [0] * (self.size - len(parts))
        piece_sizes = [0] * self.size
        has_matrix = self.rank < len(parts)
        if has_matrix:
            width = parts[self.rank].shape[1]
            for rank in range(self.size):
                rank_rows = rows_of(rank, self.size, heights[self.rank])
                piece_sizes[rank] = (rank_rows.stop - rank_rows.start) * width
        shards = torch.cat([part.flatten() for part in parts])
        matrix = shards.new_empty(sum(piece_sizes))
        with self._together("matrices to those who work on them"):
            dist.all_to_all_single(matrix, shards, piece_sizes, shard_sizes)
        if has_matrix:
            matrix = work(self.rank, matrix.view(-1, width)).flatten()
        with self._together("matrices that come back"):
            dist.all_to_all_single(shards, matrix, shard_sizes, piece_sizes)
        results = shards.split(shard_sizes[: len(parts)])
        return [result.view_as(part) for result, part in zip(results, parts, strict=True)]

    def mirror(self, model: Transformer, device: torch.device | str = "cpu") -> Transformer | None:
        """Return the whole model, frozen; None on other ranks. Adapters and aligned codes are
        shared."""
        whole_model = None
        if self.leads:
            dtype = self.dtype(next(model.parameters()))
            whole_model = Transformer(model.spec, device, dtype).requires_grad_(False)
            if self.device.type == "cuda" and torch.device(device).type == "cpu":
                pin(list(whole_model.parameters()))
            for (_, mirror_linear), (_, linear) in zip(
                whole_model.linears(), model.linears(), strict=True
            ):
                mirror_linear.adapter, mirror_linear.aligned = linear.adapter, linear.aligned
        self._copy(whole_model, model, [*model.blocks, model])
        if whole_model is not None:
            self._name(whole_model, model)
        return whole_model

    def _name(self, mirror: Transformer, model: Transformer) -> None:
        for (_, mirror_linear), (_, linear) in zip(mirror.linears(), model.linears(), strict=True):
            if linear in self._named and isinstance(mirror_linear.weight, Tensor):
                qtensor = over(mirror_linear.weight)
                assert qtensor is not None, "plain floating point has a name"
                _set_weight(mirror_linear, qtensor)

    def refill(self, mirror: Transformer | None, model: Transformer) -> None:
        """Copy the weights that learn into a mirror again."""
        self._copy(mirror, model, [module for module in (*model.blocks, model) if _learns(module)])

    @torch.no_grad()
    def _copy(
        self, mirror: Transformer | None, model: Transformer, modules: list[nn.Module]
    ) -> None:
        """Gather the modules in turn on all ranks, and copy their parameters into the mirror."""
        self.forget()
        targets = {} if mirror is None else dict(mirror.named_parameters())
        for module in modules:
            prefix = f"blocks.{module.layer}." if isinstance(module, Block) else ""
            with _gathered(module):
                for name, parameter in module.named_parameters():
                    target = targets.get(prefix + name)
                    # a DTensor is not gathered: it belongs to a block inside the model
                    is_gathered = not isinstance(parameter, DTensor)
                    # the mirror shares adapters
                    if target is not None and is_gathered and target is not parameter:
                        target.copy_(parameter, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _read_blocks(self, model: Transformer) -> Iterator[list[Block]]:
        for block in model.blocks:
            assert isinstance(block, Block)
            with _gathered(block):
                yield [block]


def pieces(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Lay buffers of these sizes out in page-locked memory: the bytes of each piece, and the
    offsets in it.

    torch rounds a request up to a power of two: matrix by matrix a 7B model takes 1.8 times its
    bytes, in these pieces at most a seventh more.
    """
    return min((_lay_out(sizes, max_bytes) for max_bytes in PIECES), key=rounded)


def rounded(found: Sequence[tuple[int, list[int]]]) -> int:
    """Return the bytes that torch takes for such pieces."""
    return sum(1 << max(0, nbytes - 1).bit_length() for nbytes, _ in found)


def _lay_out(sizes: Sequence[int], most: int) -> list[tuple[int, list[int]]]:
    layout: list[tuple[int, list[int]]] = []
    for size in sizes:
        if not layout or layout[-1][0] + size > most:
            layout.append((0, []))
        end, starts = layout[-1]
        layout[-1] = -(-(end + size) // PLACE) * PLACE, [*starts, end]
    return layout


def pin(parameters: Sequence[nn.Parameter], pinned: bool = True) -> None:
    """Move CPU parameters to page-locked memory, without their content."""
    remaining = iter(parameters)
    for nbytes, starts in pieces([p.nbytes for p in parameters]):
        piece = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        for start, p in zip(starts, remaining, strict=False):
            p.data = piece[start : start + p.nbytes].view(p.dtype).view(p.shape)


@contextmanager
def _gathered(module: nn.Module) -> Iterator[None]:
    assert isinstance(module, FSDPModule)
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def _set_weight(linear: Linear, weight: QTensor | nn.Parameter) -> None:
    codes = linear.aligned, linear.transposed
    linear.set_weight(weight)
    linear.aligned, linear.transposed = codes


def _learns(module: nn.Module) -> bool:
    return any(p.requires_grad and isinstance(p, DTensor) for p in module.parameters())


def _check_not_low_bit(model: Transformer) -> None:
    for name, linear in model.linears():
        weight = linear.weight
        if not isinstance(weight, QTensor):
            continue
        if not get_format(weight.format).dense or weight.tensors["weight"].dtype != model.dtype:
            raise ValueError(
                f"train.sharding: full: {name} is {weight.format} under {model.dtype}, which stays "
                "whole; write train.sharding: none (every GPU has the base, all learn the adapter)"
            )
