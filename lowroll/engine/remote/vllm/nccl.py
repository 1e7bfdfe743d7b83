"""Full updates by vLLM's own weight transfer, from the learner's GPU to vLLM's over NCCL.

    /init_weight_transfer_engine   once: learner and workers meet in one communicator
    /start_weight_update           each time, while vLLM is paused without requests
    /update_weights                names, dtypes and shapes; meanwhile each tensor is broadcast
    /finish_weight_update          vLLM makes its own layout of them

From version 0.32 on the communicator's id travels in the request. Older ones fetch it from a
TCPStore as a pickle, written here byte by byte. The store listens on loopback alone, since its
clients could replace the pickle (docs/vllm.md).
"""

from __future__ import annotations

import base64
import ctypes
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from lowroll.engine.remote.event_loop import MARGIN
from lowroll.engine.remote.http_client import HttpCall, ServerError
from lowroll.engine.remote.vllm.probe import TRANSFER, ProbedVllm
from lowroll.model.names import dtype_of
from lowroll.weights.sync.update import WeightUpdate, check_content

ID_IN_REQUEST = (0, 32)  # first known version
STORED_ID = "broadcast_from/0/0"  # where vLLM's StatelessProcessGroup looks
TURN = 0.05
INIT, START, UPDATE, FINISH = TRANSFER


class NcclTransfer:
    """The learner's end. begin: starts a call to the server. local: vLLM is on this machine.
    deadline_s: of each step."""

    def __init__(
        self,
        begin: Callable[[HttpCall], Future[Any]],
        found: ProbedVllm,
        deadline_s: float,
        local: bool,
    ) -> None:
        if found.version < ID_IN_REQUEST and not local:
            raise ValueError(
                f"way: nccl to a {found.shown} on another machine would open a store to the "
                f"network that vLLM unpickles; use vLLM 0.32 or newer, or folder"
            )
        self._begin_call = begin
        self.found = found
        self.deadline_s = deadline_s
        self._communicator: Communicator | None = None
        self._store: TCPStore | None = None

    def check(self, update: WeightUpdate) -> dict[str, Tensor]:
        """Return the dense tensors of a full update. ValueError as of `check_content`, and for
        tensors on a CPU."""
        tensors = dict(update.tensors())
        if len({t.device for t in tensors.values()}) != 1 or not all(
            tensor.is_cuda for tensor in tensors.values()
        ):
            raise ValueError("way: nccl sends from one CUDA device, and the update lies elsewhere")
        check_content(update, tensors)
        return tensors

    def send(self, tensors: Mapping[str, Tensor], dtype_name: str) -> None:
        dtypes = {name: dtype_of(name, getattr(torch, dtype_name)) for name in tensors}
        communicator = self.meet(next(iter(tensors.values())).device)
        self._order(START, {})
        tensor_facts = {
            "names": list(tensors),
            "dtype_names": [str(dtype).removeprefix("torch.") for dtype in dtypes.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        answer = self._begin(UPDATE, {"update_info": tensor_facts})

        def broadcast() -> None:
            for name, tensor in tensors.items():
                communicator.broadcast(tensor.detach().to(dtypes[name]).contiguous())
            communicator.finish()

        self._beside(answer, broadcast, "the broadcast of weights")
        self._order(FINISH, {})

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.abort()
        self._communicator = self._store = None

    def meet(self, device: torch.device) -> Communicator:
        """Return the communicator with vLLM's workers, who join the first time."""
        if self._communicator is not None:
            return self._communicator
        call = HttpCall("GET", "/get_world_size", "the number of vLLM's workers", again=True)
        num_workers = self._begin_call(call).result(call.deadline_s + MARGIN)["world_size"]
        communicator = Communicator(int(num_workers) + 1, device)
        init_info: dict[str, Any] = {"rank_offset": 1, "world_size": communicator.world}
        if self.found.version >= ID_IN_REQUEST:
            init_info["nccl_unique_id_b64"] = base64.b64encode(communicator.unique_id).decode()
        else:
            self._store, port = stored_id(communicator.unique_id)
            init_info |= {"master_address": "127.0.0.1", "master_port": port}
        answer = self._begin(INIT, {"init_info": init_info})
        self._communicator = communicator
        self._beside(answer, communicator.join, "meeting vLLM's workers")
        return communicator

    def _beside(self, answer: Future[Any], work: Callable[[], None], what: str) -> None:
        """Do `work` in a thread while the server does its part. When one fails or takes too long,
        abort the communicator, in which the other would wait forever. ServerError, the server's own
        first."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        end = time.monotonic() + self.deadline_s
        while thread.is_alive() and time.monotonic() < end:
            thread.join(timeout=TURN)
            if answer.done() and answer.exception(timeout=0) is not None:
                break
        if errors or thread.is_alive():
            self.close()
            if answer.done():
                answer.result(timeout=0)  # raises the server's error
            answer.cancel()
            reason = str(errors[0]) if errors else f"not done within {self.deadline_s:g} s"
            raise ServerError(f"{what}: {reason}")
        answer.result(timeout=max(TURN, end - time.monotonic()))

    def _begin(self, path: str, body: object) -> Future[Any]:
        label = f"weight transfer ({path})"
        return self._begin_call(HttpCall("POST", path, label, body, self.deadline_s))

    def _order(self, path: str, body: object) -> None:
        self._begin(path, body).result(self.deadline_s + MARGIN)


def stored_id(unique_id: bytes) -> tuple[TCPStore, int]:
    """Return a store on loopback with a communicator's id for vLLM's workers, and its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        use_libuv=False,
        master_listen_fd=listening.detach(),
    )
    store.set(STORED_ID, as_vllm_reads_it(unique_id))  # type: ignore[arg-type]  # or bytes
    return store, port


def as_vllm_reads_it(unique_id: bytes) -> bytes:
    """Return the pickle (protocol 3) of vLLM's `ncclUniqueId`: the call
    `_ctypes._unpickle(ncclUniqueId, ({}, bytes))`."""
    assert len(unique_id) == ID_BYTES
    return (
        b"\x80\x03c_ctypes\n_unpickle\n"
        b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
        b"}C" + bytes([ID_BYTES]) + unique_id + b"\x86\x86R."
    )


ID_BYTES = 128
_NCCL_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # ncclDataType_t
_NCCL_SUM = 0  # ncclRedOp_t


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


class Communicator:
    """Rank 0 of `world` ranks. `join` and `broadcast` wait for the others."""

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
        return bytes(self._id)

    def join(self) -> None:
        """Join the communicator, and sum one number as vLLM's workers do."""
        with torch.cuda.device(self.device):
            self._call("ncclCommInitRank", ctypes.byref(self._comm), self.world, self._id, 0)
            arrival_count = torch.zeros(1, device=self.device)
            pointer = ctypes.c_void_p(arrival_count.data_ptr())
            self._call(
                "ncclAllReduce", pointer, pointer, ctypes.c_size_t(1), 7, _NCCL_SUM, *self._tail
            )
            self._stream.synchronize()

    def broadcast(self, tensor: Tensor) -> None:
        """Send a contiguous tensor of this device, on its current stream."""
        pointer = ctypes.c_void_p(tensor.data_ptr())
        count = ctypes.c_size_t(tensor.numel())
        with torch.cuda.device(self.device):
            nccl_type = _NCCL_TYPES[tensor.dtype]
            self._call("ncclBroadcast", pointer, pointer, count, nccl_type, 0, *self._tail)

    def finish(self) -> None:
        self._stream.synchronize()

    def abort(self) -> None:
        """Abort, from any thread."""
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
