"""vLLM as a worker of `bench.peer`, taking turns with ours on one GPU.

It needs no lowroll: it runs with the Python that vLLM is installed for. It says that it is ready by
{"ready": true, "seconds": ..., "vllm": ...}. Then each order

    {"prompts": [[...], ...], "copies": 8, "new_tokens": 256,      one call of LLM.generate, each prompt `copies` times
     "asked": {"top_k": 50, ...}}                                  with these fields of `lowroll.types.Request`

is answered by {"seconds": ..., "tokens": ...}. Started with the word `clients` it is no engine but
vLLM's own bench client (`vllm bench serve`), kept loaded: each

    {"arguments": ["--base-url", "http://127.0.0.1:8000", ...]}     arguments of `vllm bench serve`

is answered by the numbers that it stores with --save-result.

vLLM gets its best settings for this work: dummy weights in the format's own layout, CUDA graphs of
the very batch sizes that will run, prefix caching, the engine in this process, no detokenising. The
sampled token's log-prob is asked for, because RL needs it.

A mixture of experts is routed by vLLM's own simulator (VLLM_MOE_ROUTING_SIMULATION_STRATEGY), to
uniformly random experts; the router's logits are still computed. Dummy weights, whose codes are
whatever memory held, route by accident.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from bench.worker import channel, orders

# prompts, new tokens of each, fields of the requests -> tokens made
Generate = Callable[[list[list[int]], int, dict[str, Any]], int]
Bench = Callable[[list[str]], dict[str, Any]]
NAMES = {"stop_ids": "stop_token_ids"}  # of fields that vLLM calls otherwise


def _weights(**changes: Any) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
        **changes,
    }


_PER_TOKEN = {"strategy": "token", "dynamic": True}
FORMATS: dict[
    str, tuple[str, dict[str, Any], dict[str, Any] | None] | None
] = {  # layout, weights, activations
    "bf16": None,
    "int8": ("int-quantized", _weights(), _weights(**_PER_TOKEN)),
    "fp8": ("float-quantized", _weights(type="float"), _weights(type="float", **_PER_TOKEN)),
    "int4": ("pack-quantized", _weights(num_bits=4, strategy="group", group_size=128), None),
    "nvfp4": (
        "nvfp4-pack-quantized",
        _weights(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        None,
    ),
}


def config(shape: dict[str, Any], format: str) -> dict[str, Any]:
    """Return config.json of the shape with its linear layers in a format, as compressed-tensors
    writes it."""
    quantized = FORMATS[format]
    if quantized is None:
        return shape
    layout, weights, activations = quantized
    # A router picks experts and is tiny: no tool quantizes it.
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        **shape,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": layout,
            "ignore": ["lm_head", "re:.*mlp.gate$"],
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "config_groups": {"group_0": group},
        },
    }


def load(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    began = time.perf_counter()
    mixture = "num_experts" in settings["shape"]
    if mixture:
        os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    most, length = max(settings["batches"]), settings["length"]
    sizes = sorted({size for size in (1, 8, 64) if size < most} | set(settings["batches"]))
    silent = settings.get("stops", [])
    # One folder a model: vLLM's cache of compiled graphs knows a model by its path.
    folder = Path(tempfile.gettempdir()) / "bench-vllm" / f"{settings['name']}-{settings['format']}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(settings["shape"], settings["format"])))
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=length,
        max_num_seqs=most,
        max_num_batched_tokens=16384,
        enable_prefix_caching=True,
        gpu_memory_utilization=settings["memory_fraction"],
        kv_cache_memory_bytes=settings["cache_bytes"],
        compilation_config={"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": most},
        disable_log_stats=True,
    )

    if mixture and (routers := set(llm.apply_model(routers_of)[0])) != {"RoutingSimulatorRouter"}:
        raise RuntimeError(f"vLLM's experts are routed by {routers}, not by its simulator")

    llm.apply_model(lambda model: silence(model, silent))

    def generate(prompts: list[list[int]], new_tokens: int, asked: dict[str, Any]) -> int:
        fields = {
            "temperature": 1.0,
            "max_tokens": new_tokens,
            "min_tokens": new_tokens,
            "ignore_eos": True,
            **{NAMES.get(name, name): value for name, value in asked.items()},
        }
        sampling = SamplingParams(**fields, logprobs=0, detokenize=False)
        answers = llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False
        )
        assert all(answer.outputs[0].logprobs is not None for answer in answers)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return generate, {
        "ready": True,
        "seconds": time.perf_counter() - began,
        "vllm": vllm.__version__,
        "kernels": sorted(set(llm.apply_model(kernels_of)[0])),
    }


def silence(model: Any, ids: Iterable[int]) -> None:
    """Make the logits 0 for these ids, whatever is drawn."""
    for token in ids:
        model.lm_head.weight.data[token].zero_()


def kernels_of(model: Any) -> list[str]:
    """Return the classes of the kernels that quantized matrices in vLLM's model are multiplied by,
    where they have a name."""
    schemes = [getattr(module, "scheme", None) for module in model.modules()]
    kernels = [getattr(scheme, "kernel", None) for scheme in schemes]
    return [type(kernel).__name__ for kernel in kernels if kernel is not None]


def routers_of(model: Any) -> list[str]:
    return [type(module.router).__name__ for module in model.modules() if hasattr(module, "router")]


def load_clients(settings: dict[str, Any]) -> tuple[Bench, dict[str, Any]]:
    import vllm
    from vllm.benchmarks import serve

    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.get_tokenizer = cache(serve.get_tokenizer)  # seconds, for a large one

    def bench(arguments: list[str]) -> dict[str, Any]:
        found = asyncio.run(serve.main_async(parser.parse_args(arguments)))
        return {key: value for key, value in found.items() if isinstance(value, int | float | str)}

    return bench, {"ready": True, "vllm": vllm.__version__}


def serve(load: Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]]) -> None:
    settings, say = channel()
    made, ready = load(settings)
    say(ready)
    for order in orders():
        if "arguments" in order:
            say(made(order["arguments"]))
            continue
        prompts = [ids for ids in order["prompts"] for _ in range(order["copies"])]
        began = time.perf_counter()
        tokens = made(prompts, order["new_tokens"], order.get("asked", {}))
        say({"seconds": time.perf_counter() - began, "tokens": tokens})


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    serve(load_clients if "clients" in sys.argv[1:] else load)


if __name__ == "__main__":
    main()
