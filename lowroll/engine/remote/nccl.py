"""The few calls of NCCL that send tensors to a vLLM, from the library that torch has loaded.

torch's own process groups agree on their communicator in a way of their own; vLLM's workers join
one that was made with `ncclCommInitRank`. Source: nccl.h, whose C interface is stable within 2.x.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

ID_BYTES = 128
_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # ncclDataType_t
_SUM = 0  # ncclRedOp_t


class UniqueId(ctypes.Structure):
    """ncclUniqueId"""

    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


class Communicator:
    """Rank 0 of `world` ranks. `join` waits for the others, and `broadcast` for all to have it."""

    def __init__(self, world: int, device: torch.device) -> None:
        self.world = world
        self.device = device
        self._nccl = ctypes.CDLL("libnccl.so.2")
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._id = UniqueId()
        self._comm = ctypes.c_void_p()
        self._call("ncclGetUniqueId", ctypes.byref(self._id))

    @property
    def unique_id(self) -> bytes:
        """What the other ranks need to join."""
        return bytes(self._id)

    def join(self) -> None:
        """Meet the others. vLLM's workers sum one number as they arrive, and so does this one."""
        with torch.cuda.device(self.device):
            self._call("ncclCommInitRank", ctypes.byref(self._comm), self.world, self._id, 0)
            one = torch.zeros(1, device=self.device)
            here = ctypes.c_void_p(one.data_ptr())
            self._call("ncclAllReduce", here, here, ctypes.c_size_t(1), 7, _SUM, *self._tail)
            self._stream.synchronize()

    def broadcast(self, tensor: Tensor) -> None:
        """Send a contiguous tensor of this device. Queued on the device's current stream."""
        here = ctypes.c_void_p(tensor.data_ptr())
        count = ctypes.c_size_t(tensor.numel())
        with torch.cuda.device(self.device):
            kind = _TYPES[tensor.dtype]
            self._call("ncclBroadcast", here, here, count, kind, 0, *self._tail)

    def finish(self) -> None:
        """Wait until all that was queued is sent."""
        self._stream.synchronize()

    def abort(self) -> None:
        """Give up what is under way, from any thread; the communicator is gone."""
        if self._comm:
            self._nccl.ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    @property
    def _tail(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return self._comm, ctypes.c_void_p(self._stream.cuda_stream)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._nccl, name)(*arguments)
        if status:
            reason = self._nccl.ncclGetErrorString(status).decode()
            raise RuntimeError(f"{name}: {reason}")
