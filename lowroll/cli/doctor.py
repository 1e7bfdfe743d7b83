"""`lowroll doctor`: print the machine's facts, the kernel of every product, and why a faster one is
not used. With MODEL: print what would run of a model."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from operator import itemgetter
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

OPTIONAL = {
    "bitsandbytes": "the optimizer adamw8bit on a GPU",
    "datasets": "environments whose prompts lie on the hub",
    "reasoning-gym": "the environments of reasoning-gym",
}
# for low-bit and bfloat16 products, as in /proc/cpuinfo
INSTRUCTIONS = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "i8mm",
    "bf16",
    "sve",
)
CPUINFO = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")
MOST_HINTS = 4
GIB = 1 << 30


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll doctor",
        description=(
            "Print what this machine has (devices, driver, compilers, packages, threads), which "
            "kernel every product of a run takes here, why a faster one is not taken, and what "
            "would help. It changes nothing and takes a few seconds."
        ),
    )
    p.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder or hub id: say in one line what would run of it, in place of the rest",
    )
    p.add_argument("--json", action="store_true", help="print it as JSON")
    return p


def run(arguments: argparse.Namespace) -> int:
    if arguments.model is not None:
        line = _describe_model(arguments.model)
        print(json.dumps({"model": line}) if arguments.json else line)
        return 0
    facts = look()
    facts["hints"] = hints(facts)
    print(json.dumps(facts, indent=2) if arguments.json else show(facts))
    return 0


def _describe_model(model: str) -> str:
    import torch

    from lowroll.cli import supported

    if torch.cuda.is_available():
        return supported.describe(model, torch.device("cuda"), torch.bfloat16)
    return supported.describe(model, torch.device("cpu"), torch.float32)


# -- looking -----------------------------------------------------------------------------------------


def look() -> dict[str, Any]:
    """Return the machine's facts as JSON data. A missing one is None, or the reason."""
    from lowroll import __version__, machine

    return {
        "lowroll": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "memory": {"total": machine.total_memory(), "free": machine.free_memory()},
        "driver": driver_version(),
        "sandbox": _sandbox(),
        "packages": {name: _version(name) for name in ("torch", "triton", *OPTIONAL)},
        **_torch_facts(),
    }


def _cpu() -> dict[str, Any]:
    from lowroll.machine import usable_cores

    try:
        cpuinfo = CPUINFO.read_text()
    except OSError:
        cpuinfo = ""
    name = re.search(r"^model name\s*: (.*)", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)", cpuinfo, re.MULTILINE)
    flag_set = set(flags[1].split()) if flags else set()
    return {
        "name": name[1] if name else platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "instructions": [flag for flag in INSTRUCTIONS if flag in flag_set],
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def driver_version() -> str | None:
    try:
        match = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", DRIVER.read_text())
    except OSError:
        return None
    return match[1] if match else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _sandbox() -> dict[str, str | None]:
    from lowroll.envs.sandbox import SandboxMissing, isolation

    try:
        return {"by": isolation.found().name, "why_not": None}
    except SandboxMissing as why:
        return {"by": None, "why_not": str(why)}


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"torch": {"error": str(error)}, "devices": [], "nvcc": None, "kernels": {}}
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return {
        "torch": {"cuda": torch.version.cuda, "threads": torch.get_num_threads()},
        "devices": [_device_facts(index) for index in range(torch.cuda.device_count())],
        "device": str(device),
        "nvcc": _nvcc_facts(device),
        "kernels": _kernel_answers(device),
    }


def _device_facts(index: int) -> dict[str, Any]:
    import torch

    try:
        properties = torch.cuda.get_device_properties(index)
    except RuntimeError as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        return {"name": f"cuda:{index}", "error": first_line}
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": properties.total_memory,
    }


def _nvcc_facts(device: torch.device) -> dict[str, Any] | None:
    from lowroll.kernels import nvcc

    path = nvcc.compiler()
    if path is None:
        return None
    facts: dict[str, Any] = {"path": str(path), "version": nvcc.version()}
    if device.type == "cuda":
        facts["why_not"] = nvcc.supports_device(device).why_not
    return facts


def _kernel_answers(device: torch.device) -> dict[str, list[dict[str, Any]]]:
    from lowroll.kernels import dispatch

    return {
        product: [
            {
                "kernel": answer.kernel.name,
                "language": answer.kernel.language,
                "takes": answer.kernel.takes,
                "used": bool(answer.support),
                "why_not": answer.support.why_not,
            }
            for answer in dispatch.answers(product, device)
        ]
        for product in dispatch.PRODUCTS
    }


# -- advice ------------------------------------------------------------------------------------------


def hints(found: dict[str, Any]) -> list[str]:
    """Return a few hints for faster runs, the most important first."""
    if "error" in found["torch"]:
        return ["torch cannot be imported, and nothing runs without it: install it again"]
    return [*_cuda_hints(found), *_cpu_hints(found)][:MOST_HINTS]


def _cuda_hints(found: dict[str, Any]) -> list[str]:
    if found["device"] == "cpu":
        return [_explain_no_cuda(found)]
    hints = []
    if found["packages"]["triton"] is None:
        hints.append("Triton is missing, so almost every kernel is plain torch: pip install triton")
    if not _answer(found, "fp8 product", "torch._scaled_mm")["used"]:
        hints.append("this GPU does not multiply FP8: take weights: int8 in the place of fp8")
    streamed = _answer(found, "4-bit product (nvfp4, mxfp4, int4)", "matmul/streamed.cu")
    if not streamed["used"]:
        hints.append(
            "4-bit weights are dequantized for every product here, so they save memory, not time"
            f"{_remedy(found, streamed)}"
        )
    return hints


def _remedy(found: dict[str, Any], streamed: dict[str, Any]) -> str:
    if "capability" in streamed["why_not"]:
        return "; weights: int8 is faster on this GPU"
    if found["nvcc"] is None:
        return ": install the CUDA toolkit, or set CUDA_HOME to where its nvcc is"
    return ": nvcc is there and does not work (its words are above)"


def _answer(found: dict[str, Any], product: str, kernel: str) -> dict[str, Any]:
    return next(answer for answer in found["kernels"][product] if answer["kernel"] == kernel)


def _explain_no_cuda(found: dict[str, Any]) -> str:
    if found["driver"] is None and shutil.which("nvidia-smi") is None:
        return (
            "no NVIDIA GPU: runs take the CPU, which is right for small models and for trying out"
        )
    if found["torch"]["cuda"] is None:
        return (
            "there is an NVIDIA driver, but this torch is built without CUDA: install a build with "
            "CUDA (pytorch.org, Get Started)"
        )
    return (
        "there is an NVIDIA driver, but torch finds no device: look at nvidia-smi, at "
        "CUDA_VISIBLE_DEVICES, and whether the driver is new enough for torch's CUDA "
        f"{found['torch']['cuda']}"
    )


def _cpu_hints(found: dict[str, Any]) -> list[str]:
    cpu_hints = []
    cores, threads = found["cpu"]["cores"], found["torch"]["threads"]
    omp_threads = found["cpu"]["OMP_NUM_THREADS"]
    omp_note = f" (OMP_NUM_THREADS={omp_threads})" if omp_threads else ""
    is_cpu = found["device"] == "cpu"
    if threads > cores or (is_cpu and threads < cores):
        use = f"has {threads} threads for" if threads > cores else f"uses {threads} of"
        cpu_hints.append(f"torch {use} {cores} cores{omp_note}: set OMP_NUM_THREADS={cores}")
    if not is_cpu:
        return cpu_hints
    onednn = _answer(found, "int8 product", "matmul/w8a8_onednn")
    if not onednn["used"]:
        cpu_hints.append(f"weights: int8 is slower than float32 on this CPU: {onednn['why_not']}")
    return cpu_hints


# -- showing -----------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> str:
    lines = [f"lowroll {found['lowroll']}, Python {found['python']}, {found['platform']}", ""]
    lines += [f"{name:<10}{text}" for name, text in _machine_lines(found)]
    if found["kernels"]:
        lines += ["", f"Kernels on {found['device']}"]
        lines += _kernel_lines(found["kernels"])
        lines += _refused_lines(found["kernels"])
    lines += ["", "Hints" if found["hints"] else "Nothing to mend."]
    for hint in found["hints"]:
        lines += _wrap_text(hint, "    ", first="  - ")
    return "\n".join(lines)


def _machine_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, packages = found["cpu"], found["packages"]
    total, free = found["memory"]["total"], found["memory"]["free"]
    has_memory = total is not None and free is not None
    threads = found["torch"].get("threads", "unknown")
    sandbox, *sandbox_lines = _wrap_text(found["sandbox"]["by"] or found["sandbox"]["why_not"], "")
    lines = [
        *((f"cuda:{i}", _device_text(device)) for i, device in enumerate(found["devices"])),
        ("cpu", f"{cpu['name']}, cores: {cpu['cores']}, torch's threads: {threads}"),
        ("", " ".join(cpu["instructions"])),
        ("memory", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free" if has_memory else ""),
        ("torch", _torch_text(found)),
        ("driver", found["driver"]),
        ("triton", packages["triton"] or "not installed"),
        ("nvcc", _nvcc_text(found["nvcc"])),
        ("sandbox", sandbox),
        *(("", line) for line in sandbox_lines),
        *(
            ("optional", f"{name} {packages[name] or 'not installed'} ({purpose})")
            for name, purpose in OPTIONAL.items()
        ),
    ]
    return [(name, text) for name, text in lines if text]


def _device_text(device: dict[str, Any]) -> str:
    if "error" in device:
        return f"cannot be used: {device['error']}"
    return (
        f"{device['name']}, compute capability {device['capability']}, "
        f"{device['memory'] / GIB:.1f} GiB"
    )


def _torch_text(found: dict[str, Any]) -> str:
    if "error" in found["torch"]:
        return f"cannot be imported: {found['torch']['error']}"
    cuda = found["torch"]["cuda"]
    return f"{found['packages']['torch']}, " + (f"CUDA {cuda}" if cuda else "built without CUDA")


def _nvcc_text(nvcc: dict[str, Any] | None) -> str:
    if nvcc is None:
        return "none in $CUDA_HOME, on the PATH or in /usr/local/cuda"
    problem_note = f"; {nvcc['why_not']}" if nvcc.get("why_not") else ""
    return f"{nvcc['version']} ({nvcc['path']}){problem_note}"


def _kernel_lines(kernels: dict[str, list[dict[str, Any]]]) -> list[str]:
    width = max(map(len, kernels))
    lines = []
    for product, answers in kernels.items():
        label, takes_by_default = product, ""
        for answer in filter(itemgetter("used"), answers):
            language = f" ({answer['language']})" if answer["language"] != "torch" else ""
            takes = answer["takes"] or takes_by_default
            name = f"{answer['kernel']}{language}{': ' if takes else ''}{takes}"
            lines.append(f"  {label:<{width}}  {name}")
            label, takes_by_default = "", "the rest"
    return lines


def _refused_lines(kernels: dict[str, list[dict[str, Any]]]) -> list[str]:
    refused: dict[str, dict[str, None]] = {}
    for answer in chain.from_iterable(kernels.values()):
        if not answer["used"]:
            refused.setdefault(answer["why_not"], {})[answer["kernel"]] = None
    lines = ["", "Not used here"] if refused else []
    for reason, names in refused.items():
        lines += [f"  {reason}:", *_wrap_text(", ".join(names), "    ")]
    return lines


def _wrap_text(text: str, indent: str, first: str | None = None) -> list[str]:
    initial = indent if first is None else first
    return wrap(text, 96, initial_indent=initial, subsequent_indent=indent, break_on_hyphens=False)
