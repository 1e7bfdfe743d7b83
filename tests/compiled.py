"""Compile for a GPU that is not there: kernels as an H100 or H200 (sm_90) would run them.

`compiled` takes a call: every launch within it is turned into a compilation of the same kernel for
the same arguments, and writes nothing, so the outputs that the call returns are unfilled. `built`
takes one kernel with the types of its arguments, for what no call on the CPU reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch


def built(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    loose: tuple[str, ...] = (),
    **options: int,
) -> Any:
    """The kernel with arguments of these types ("*bf16", "i32", ...), the others constants; its
    `asm` has PTX and SASS.

    Pointers and integers are multiples of 16, but for the `loose` ones.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind[0] in "*i" and name not in loose
    }
    source = ASTSource(
        kernel, {name: types.get(name, "constexpr") for name in names}, dict(constants), aligned
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compiled(call: Callable[[], object]) -> list[tuple[str, str]]:
    """(kernel, its SASS) for each launch within `call`, whose tensors lie on the CPU."""
    from triton.runtime.jit import JITFunction, mangle_type

    listings: list[tuple[str, str]] = []

    def launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = kernel.arg_names
        values = dict(zip(names, args, strict=False)) | {
            name: options.pop(name) for name in names if name in options
        }
        fixed = {
            name: value
            for name, value in values.items()
            if value is None or kernel.params[names.index(name)].is_constexpr or value is True
        }
        types = {name: mangle_type(value) for name, value in values.items() if name not in fixed}
        loose = tuple(name for name in types if isinstance(values[name], int) and values[name] % 16)
        listings.append(
            (kernel.__name__, built(kernel, types, fixed, loose, **options).asm["sass"])
        )

    with (
        patch.object(JITFunction, "run", launch),
        patch("lowroll.kernels.launch.INTERPRETED", True),
    ):
        call()
    assert listings, "the call launched nothing"
    return listings
