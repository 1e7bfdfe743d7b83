"""Learner ranks: processes that train one model together (docs/architecture.md).

Values are sent as tensors, never as pickles. A rank notes its position in the store before each
wait, so that an error names the missing ones.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowroll.parallel.store import tcp_store
from lowroll.transport.base import DeadlineExceeded, TransportError, check_deadline, wait_until

if TYPE_CHECKING:
    from lowroll.model.transformer import Transformer

PerToken = dict[int, Tensor]  # sample index -> float32 [tokens of its response], detached

BUCKET = 64 << 20  # entries of gradients sent at once
ROLL_CALL_S = 2.0  # a rank that has not failed so long after a failure is missing
IFREQ = 40  # bytes of Linux' struct ifreq
SIOCGIFADDR = 0x8915


class RankLost(TransportError):
    """A rank that disappeared while the others waited for it."""


def rows_of(rank: int, size: int, height: int) -> slice:
    """Return a rank's rows of a matrix (entries of a vector): equal shares from the first rank on;
    the last ones may have fewer, or none."""
    rows_per_rank = -(-height // size)
    return slice(min(rank * rows_per_rank, height), min((rank + 1) * rows_per_rank, height))


class Ranks:
    """A single process that trains alone, and the interface of groups."""

    rank = 0
    size = 1
    lockstep = False  # every pass needs all ranks

    @property
    def leads(self) -> bool:
        """Return whether this rank reads, writes and decides for the group."""
        return self.rank == 0

    def deal(self, costs: Sequence[float]) -> list[int | None]:
        """Return this rank's passes in order, by their costs. None is a pass run only to keep the
        others in lockstep."""
        return list(range(len(costs)))

    def gather(self, values: Sequence[PerToken], sizes: dict[int, int]) -> list[PerToken]:
        """Return the values of all ranks: for each kind, those of all samples of `sizes` (sample ->
        tokens), each from one rank."""
        return list(values)

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Sum every gradient (float32) over the ranks, in place."""

    def total(self, squares: Tensor) -> Tensor:
        """Sum a squared norm over the ranks' parts."""
        return squares

    def shard(self, model: Transformer) -> Transformer:
        """Keep this rank's shards of a whole model, and return it."""
        return model

    def mirror(self, model: Transformer, device: torch.device | str = "cpu") -> Transformer | None:
        """Return an unsharded model with the sharded one's weights on the leading rank; the model
        itself if it is not sharded."""
        return model

    def refill(self, mirror: Transformer | None, model: Transformer) -> None:
        """Update a mirror's weights. All ranks call it; those without one pass None."""

    def forget(self) -> None:
        """Drop whole copies of parameters before their shards change."""

    def is_part(self, p: Tensor) -> bool:
        """Return whether ranks hold a parameter's rows in shards."""
        return False

    def part(self, p: Tensor) -> Tensor:
        """Return this rank's shard of a parameter or gradient, as a view."""
        return p

    def cut(self, whole: Tensor, p: Tensor) -> Tensor:
        """Return this rank's shard out of a whole tensor of as many rows (or of what gives its rows
        to a slice)."""
        return whole[:]

    def dtype(self, p: Tensor) -> torch.dtype:
        """Return the dtype in which passes read a parameter."""
        return p.dtype

    def on_whole(
        self, work: Callable[[int, Tensor], Tensor], parts: Sequence[Tensor], heights: Sequence[int]
    ) -> list[Tensor]:
        """Call work(i, whole) on sharded matrices [heights[i], K], at most one a rank, and return
        this rank's shards of the results, of the same shapes."""
        return [work(i, whole) for i, whole in enumerate(parts)]

    def tell(self, data: bytes | None = None, wait_s: float | None = None) -> bytes:
        """Send data from the leading rank, and return it on every rank. The others wait `wait_s`
        for it to begin, by default the deadline."""
        assert data is not None
        return data

    def meet(self, what: str) -> None:
        """Wait for all ranks. DeadlineExceeded names `what`."""

    def close(self) -> None:
        """Leave the group."""


ALONE = Ranks()


class RankGroup(Ranks):
    """One process of `size`, each with the whole model (plain data parallel), which meet at
    tcp://host:port.

    host: the leading rank's IPv4 address or name; its store listens there alone, and so do gloo and
    NCCL where the address is this machine's (unless GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are
    set). Host tensors use gloo, CUDA tensors NCCL. deadline_s: for every wait. Raises
    DeadlineExceeded, RankLost.
    """

    def __init__(
        self, rank: int, size: int, host: str, port: int, device: torch.device, deadline_s: float
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank: must lie in 0 .. {size - 1}, is {rank}")
        self.rank = rank
        self.size = size
        self.device = device
        self.deadline_s = check_deadline(deadline_s)
        self._told = 0
        self._failed = False
        _bind_to_interface(host)
        self._store = _open_store(host, port, self.leads and not _has_torchrun_store(), deadline_s)
        with self._together("the start"):
            self._wait_for_all(f"to start and meet at {host}:{port}")
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        with self._together("the connections"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=dist.PrefixStore("group", self._store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=deadline_s),
                device_id=device if cuda else None,
            )

    def deal(self, costs: Sequence[float]) -> list[int | None]:
        # LPT (Graham 1969: at most 4/3 of the optimum); in lockstep like costs run side by side
        costliest_first = sorted(range(len(costs)), key=lambda i: -costs[i])
        if self.lockstep:
            return self._deal_rounds(costliest_first)
        loads = [0.0] * self.size
        own_passes: list[int] = []
        for pass_index in costliest_first:
            least_loaded = loads.index(min(loads))
            loads[least_loaded] += costs[pass_index]
            if least_loaded == self.rank:
                own_passes.append(pass_index)
        return [*sorted(own_passes)]

    def _deal_rounds(self, passes: Sequence[int]) -> list[int | None]:
        """Return this rank's pass of each round of `size` passes, None where the last round has too
        few. Every other round is dealt from the last rank on: none always gets the costliest."""
        own_passes: list[int | None] = []
        for start in range(0, len(passes), self.size):
            is_reversed = start // self.size % 2 == 1
            position = start + (self.size - 1 - self.rank if is_reversed else self.rank)
            own_passes.append(passes[position] if position < len(passes) else None)
        return own_passes

    def gather(self, values: Sequence[PerToken], sizes: dict[int, int]) -> list[PerToken]:
        # bits are summed as integers, and all ranks but one have zeros: values arrive exact
        lengths = list(sizes.values())
        flat = torch.zeros(len(values), sum(lengths))  # one row a kind, samples concatenated
        for own_values, row in zip(values, flat, strict=True):
            for sample, sample_row in zip(sizes, row.split(lengths), strict=True):
                if sample in own_values:
                    sample_row.copy_(own_values[sample])
        with self._together("what the passes found"):
            dist.all_reduce(flat.view(torch.int32))
        return [dict(zip(sizes, row.split(lengths), strict=True)) for row in flat]

    def add(self, gradients: Sequence[Tensor]) -> None:
        if self.device.type == "cuda":
            self.meet("the gradients")  # NCCL's errors name no rank
        for bucket in gradient_buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            with self._together("the gradients"):
                dist.all_reduce(flat)
            pieces = flat.split([gradient.numel() for gradient in bucket])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    def tell(self, data: bytes | None = None, wait_s: float | None = None) -> bytes:
        # the others wait for the length in the store; the bytes come by broadcast
        self._told += 1
        key = f"told/{self._told}"
        payload = bytearray(data or b"")
        with self._together("what rank 0 says"):
            if self.leads:
                assert data is not None
                self._store.set(key, str(len(data)))
            else:
                wait_until(
                    lambda: self._store.check([key]),
                    f"rank 0 of {self.size}, which leads, to say what comes next",
                    self.deadline_s if wait_s is None else wait_s,
                )
                payload = bytearray(int(self._store.get(key)))
            if payload:
                dist.broadcast(torch.frombuffer(payload, dtype=torch.uint8), src=0)
        return bytes(payload)

    def meet(self, what: str) -> None:
        with self._together(what):
            dist.all_reduce(torch.zeros(1))

    def close(self) -> None:
        if not dist.is_initialized():
            return
        with suppress(RuntimeError):
            if self._failed:  # the others would not answer
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        start_time = time.monotonic()
        try:
            self._store.set(f"at/{self.rank}", what)
            yield
        except TransportError:
            self._failed = True
            raise
        except RuntimeError as error:
            self._failed = True
            raise self._failure(what, error, time.monotonic() - start_time) from None

    def _failure(self, what: str, error: RuntimeError, waited_s: float) -> TransportError:
        """Return an error that names the missing ranks: those that have not noted within
        ROLL_CALL_S that they failed at the same wait."""
        first_line = str(error).strip().partition("\n")[0]
        self._store.set_timeout(timedelta(seconds=ROLL_CALL_S))
        try:
            self._store.set(f"failed/{self.rank}", "")
            with suppress(DeadlineExceeded):
                wait_until(lambda: not self._absent("failed"), "the others", ROLL_CALL_S)
            absent_ranks = self._names(self._absent("failed"))
            # the store ends with the leading rank, which stays to answer the others
            time.sleep(ROLL_CALL_S / 2 if self.leads else 0)
        except RuntimeError:  # the store is gone
            absent_ranks = "rank 0, at which all meet"
        lost_ranks = absent_ranks or "a rank (all failed alike)"
        if waited_s >= 0.9 * self.deadline_s:
            return DeadlineExceeded(
                f"{lost_ranks}; rank {self.rank} is at {what} ({first_line})", waited_s
            )
        return RankLost(f"{lost_ranks} went away; rank {self.rank} is at {what} ({first_line})")

    def _absent(self, word: str) -> list[int]:
        return [r for r in range(self.size) if not self._store.check([f"{word}/{r}"])]

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {r} (last at {self._store.get(f'at/{r}').decode()})" for r in ranks)

    def _wait_for_all(self, what: str) -> None:
        try:
            wait_until(lambda: not self._absent("at"), what, self.deadline_s)
        except DeadlineExceeded:
            late_ranks = ", ".join(map(str, self._absent("at")))
            raise DeadlineExceeded(
                f"rank {late_ranks} of {self.size} {what}", self.deadline_s
            ) from None


def gradient_buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    entries = 0
    for gradient in gradients:
        if bucket and entries + gradient.numel() > BUCKET:
            yield bucket
            bucket, entries = [], 0
        bucket.append(gradient)
        entries += gradient.numel()
    if bucket:
        yield bucket


def _open_store(host: str, port: int, leads: bool, deadline_s: float) -> Any:
    if leads:
        try:
            listening = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            raise TransportError(f"rank 0 cannot listen at {host}:{port}: {error}") from None
        return tcp_store(host, port, listening, deadline_s)
    wait_until(
        lambda: _accepts_connections(host, port), f"rank 0 to listen at {host}:{port}", deadline_s
    )
    return tcp_store(host, port, None, deadline_s)


def _has_torchrun_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _accepts_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _bind_to_interface(host: str) -> None:
    """Bind gloo and NCCL to the interface that reaches `host`, whatever its name resolves to."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        own_address = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            if own_address == _interface_address(probe, name):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _interface_address(probe: socket.socket, interface: str) -> bytes:
    try:
        request = interface.encode().ljust(IFREQ, b"\0")
        return fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]
    except OSError:
        return b""
