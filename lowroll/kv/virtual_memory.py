"""Device memory that can be freed and restored at the same address, so that a learner can use the
KV cache's memory between rollouts, and CUDA graphs stay valid.

Sources: CUDA driver API, "Virtual Memory Management"; vLLM's sleep mode.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """The driver's CUmemAllocationProp: pinned memory (1) on a device (1)."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class VirtualMemory:
    """Zero-filled memory on a CUDA device. RuntimeError names the failed driver call."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        torch.zeros(1, device=device)  # creates the device's context
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._memory = ctypes.c_ulonglong()
        self._properties = _Properties(1, 0, _Location(1, index))
        granularity = ctypes.c_size_t()
        _call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            ctypes.c_int(0),
        )
        self._size = ctypes.c_size_t(-(-nbytes // granularity.value) * granularity.value)
        self._address = ctypes.c_ulonglong()
        no_hint = ctypes.c_ulonglong(0)
        _call(
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            self._size,
            ctypes.c_size_t(0),
            no_hint,
            no_hint,
        )
        self.nbytes = nbytes
        self.mapped = False
        self.restore()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self._address.value, False),
            "version": 3,
        }

    def release(self) -> None:
        """Free the memory. Nothing may access the tensors until `restore`."""
        if self.mapped:
            torch.cuda.synchronize(self.device)
            _call("cuMemUnmap", self._address, self._size)
            _call("cuMemRelease", self._memory)
            self.mapped = False

    def restore(self) -> None:
        """Map zero-filled memory at the old address. RuntimeError for too little memory."""
        if self.mapped:
            return
        create_args = (
            ctypes.byref(self._memory),
            self._size,
            ctypes.byref(self._properties),
            ctypes.c_ulonglong(0),
        )
        if _driver().cuMemCreate(*create_args):
            torch.cuda.empty_cache()
            try:
                _call("cuMemCreate", *create_args)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{self.nbytes / 2**30:.1f} GiB for the KV cache: {error}"
                ) from None
        access = _Access(self._properties.location, 3)  # read and write
        try:
            _call(
                "cuMemMap",
                self._address,
                self._size,
                ctypes.c_size_t(0),
                self._memory,
                ctypes.c_ulonglong(0),
            )
            self.mapped = True
            _call(
                "cuMemSetAccess",
                self._address,
                self._size,
                ctypes.byref(access),
                ctypes.c_size_t(1),
            )
        except RuntimeError:
            if self.mapped:
                _call("cuMemUnmap", self._address, self._size)
            self.mapped = False
            _call("cuMemRelease", self._memory)
            raise
        self.tensor().zero_()

    def tensor(self) -> Tensor:
        """Return the memory as uint8 [nbytes]. Tensors over it keep it alive."""
        return torch.as_tensor(self, device=self.device)

    def __del__(self) -> None:
        if getattr(self, "mapped", False):
            _driver().cuCtxSynchronize()  # the driver may be gone at process exit: no checks
            _driver().cuMemUnmap(self._address, self._size)
            _driver().cuMemRelease(self._memory)
        if getattr(self, "_address", None):
            _driver().cuMemAddressFree(self._address, self._size)


@cache
def virtual_memory_works(device: torch.device) -> bool:
    """Return whether the device, its driver and this torch support it."""
    try:
        virtual_memory = VirtualMemory(1 << 20, device)
        tensor = virtual_memory.tensor().fill_(1)
        virtual_memory.release()
        virtual_memory.restore()
        return not tensor.any() and bool(tensor.fill_(3).eq(3).all())
    except (OSError, RuntimeError, AttributeError, TypeError):
        return False


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    error_code = getattr(_driver(), name)(*args)
    if error_code:
        error_name = ctypes.c_char_p()
        _driver().cuGetErrorName(error_code, ctypes.byref(error_name))
        raise RuntimeError(f"{name}: {(error_name.value or b'').decode() or error_code}")
