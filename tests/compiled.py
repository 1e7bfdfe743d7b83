"""Compile for a GPU that is not there: the kernels which a call would launch, as their sm_90 listings.

Every launch within `call` is turned into a compilation of the same kernel for the same arguments, and writes nothing:
the outputs that the call returns are unfilled.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch


def compiled(call: Callable[[], object]) -> list[tuple[str, str]]:
    """(kernel, its SASS) for each launch within `call`, whose tensors lie on the CPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime.jit import JITFunction, mangle_type

    listings: list[tuple[str, str]] = []

    def launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = kernel.arg_names
        values = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
        fixed = {(i,): values[name] for i, name in enumerate(names)
                 if values[name] is None or kernel.params[i].is_constexpr or values[name] is True}
        signature = {name: "constexpr" if (i,) in fixed else mangle_type(values[name]) for i, name in enumerate(names)}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if (i,) not in fixed
                   and (isinstance(values[name], torch.Tensor) or values[name] % 16 == 0)}
        made = compile(ASTSource(kernel, signature, fixed, aligned), target=GPUTarget("cuda", 90, 32), options=options)
        listings.append((kernel.__name__, made.asm["sass"]))

    with patch.object(JITFunction, "run", launch), patch("lowroll.kernels.launch.INTERPRETED", True):
        call()
    assert listings, "the call launched nothing"
    return listings
