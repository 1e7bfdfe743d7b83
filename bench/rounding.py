"""What a learner in fp8 costs in exactness: loss curves beside bfloat16, and the error of gradients.

Three ways for a small Qwen3-shaped model in bfloat16 to learn `arithmetic` by SFT from random
weights, with the same order of demonstrations a seed:

    bf16              products in bfloat16
    fp8 gradients     train.backward: fp8      gradients pass through linear layers in e4m3
    fp8               train.forward: fp8 too

At the end each model of the first way is asked for its gradients in each, against float32: the
relative error (2-norm) of every weight's gradient, by layer. And every linear product is made apart,
with the activations X, weights W and gradients dY that the model has in its backward pass: the
relative error of Y and dX for each choice of codes and scales, against float64.

On a CPU the codes are multiplied as float32 numbers, which is exact up to the order of sums.

    python -m bench.rounding [--steps 120] [--seeds 3] [--jobs 1] [--device cpu] [--out FOLDER]

writes `rounding.json` (curves, errors, machine) into the folder, by default bench/results.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.harness import RESULTS, here, parser_of, print_table
from lowroll.envs.table import make as make_env
from lowroll.kernels.quantize.rows import SMALLEST_E4M3_SCALE
from lowroll.model import hf
from lowroll.model.attention import varlen
from lowroll.model.linear import Linear
from lowroll.model.logprobs import token_log_probs
from lowroll.model.spec import read_spec
from lowroll.model.tokenizer import ChatTokenizer, load_tokenizer
from lowroll.model.transformer import Transformer
from lowroll.runs.demo import CONFIG as DEMO
from lowroll.runs.demo import build_model
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.packing import collate
from lowroll.trainer.sft import SftSettings, demonstrations, encode_all, epochs, sft_step
from lowroll.types import Sample
from lowroll.weights.aligned import align, transpose

MODEL: dict[str, Any] = {
    **DEMO,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TASK = {"template": "{text}", "min_steps": 1, "max_steps": 3, "max_operand": 9}
RATE, WARMUP, BATCH, EXAMPLES = 2e-3, 20, 32, 2048
LAST = 20  # steps whose mean is a run's end

WAYS: dict[str, tuple[str | None, bool]] = {  # the forward's format, and whether gradients are fp8
    "bf16": (None, False),
    "fp8 gradients": (None, True),
    "fp8": ("fp8", True),
}
E4M3, E5M2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)


def model_of(folder: Path, way: str, dtype: torch.dtype, device: str) -> Transformer:
    """The model of a folder, which learns so."""
    forward, backward = WAYS[way]
    model = hf.load(folder, device, dtype).requires_grad_(True)
    if forward is not None:
        align(model, forward)
    if backward:
        transpose(model)
    return model


# -- loss curves and gradients of a model ----------------------------------------------------------


def curve(model: Transformer, samples: Sequence[Sample], steps: int, seed: int) -> list[float]:
    """Nats a token of every step."""
    optimizer = Optimizer(
        model.trainable_parameters(), OptimSettings(learning_rate=RATE, warmup_steps=WARMUP)
    )
    settings, order, losses = SftSettings(BATCH), epochs(len(samples), seed), []
    for _ in range(steps):
        batch = [samples[next(order)] for _ in range(BATCH)]
        losses.append(round(sft_step(model, batch, optimizer, settings)["sft/loss"], 5))
    return losses


def gradients(model: Transformer, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Of the mean log-prob of a batch, by parameter."""
    packed = collate(samples, range(BATCH), model.device)
    hidden_TD = model(packed.ids_T, packed.pos_T, varlen(packed.lengths, model.device))
    of_responses = hidden_TD.index_select(0, packed.index_N)
    token_log_probs(of_responses, model.lm_head_weight, packed.targets_N)[0].mean().backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def by_layer(found: dict[str, Tensor], exact: dict[str, Tensor]) -> list[list[float]]:
    """Relative errors of the gradients of each block's matrices."""
    layers: list[list[float]] = [[] for _ in range(MODEL["num_hidden_layers"])]
    for name, want in exact.items():
        if name.startswith("blocks.") and want.ndim == 2:
            layers[int(name.split(".")[1])].append(apart(found[name], want))
    return layers


def apart(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


# -- one product -----------------------------------------------------------------------------------


def rounded(x: Tensor, kind: tuple[torch.dtype, float], dim: int | None, floor: float) -> Tensor:
    """x as its codes stand for it, with a scale for each index but those along `dim` (None: one
    scale)."""
    amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (amax / kind[1]).clamp_min(max(floor, 1e-30))
    return (x / scale).clamp(-kind[1], kind[1]).to(kind[0]).float() * scale


def choices() -> dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """(approximate, exact) of what each choice makes of X, W and dY."""

    def forward(x: Tensor, w: Tensor, g: Tensor, *, dim: int | None) -> tuple[Tensor, Tensor]:
        y = rounded(x, E4M3, dim, 0.0).double() @ rounded(w, E4M3, dim, 0.0).double().t()
        return y, x.double() @ w.double().t()

    def backward(
        x: Tensor, w: Tensor, g: Tensor, *, kind: Any, dim: int | None, floor: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        of_w = None if dim is None else 0
        made = rounded(g, kind, dim, floor).double() @ rounded(w, E4M3, of_w, 0.0).double()
        return made, g.double() @ w.double()

    return {
        "Y: a scale a row": partial(forward, dim=1),
        "Y: one scale": partial(forward, dim=None),
        "dX: e4m3, a scale a row": partial(backward, kind=E4M3, dim=1),
        "dX: e5m2, a scale a row": partial(backward, kind=E5M2, dim=1),
        "dX: e4m3, one scale": partial(backward, kind=E4M3, dim=None),
        "dX: e5m2, one scale": partial(backward, kind=E5M2, dim=None),
        # as if the mean were over so many more tokens
        "dX: e4m3, activations' floor, 1,000 x the tokens": partial(
            backward, kind=E4M3, dim=1, floor=1000 * SMALLEST_E4M3_SCALE
        ),
    }


@contextmanager
def watched(model: Transformer) -> Iterator[dict[str, list[Tensor]]]:
    """Inside, X and dY of every linear layer are kept by name."""
    seen: dict[str, list[Tensor]] = {}

    def look(name: str, _: Linear, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        if out.requires_grad:
            x = inputs[0].detach().float()
            out.register_hook(lambda grad: seen.update({name: [x, grad.float()]}))

    hooks = [linear.register_forward_hook(partial(look, name)) for name, linear in model.linears()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def products(model: Transformer, samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Relative errors of every choice, one for each linear layer."""
    with watched(model) as seen:
        gradients(model, samples)
    weights = {name: linear.weight for name, linear in model.linears()}
    found: dict[str, list[float]] = {}
    for name, make in choices().items():
        for layer, (x, g) in seen.items():
            weight = weights[layer]
            assert isinstance(weight, Tensor)
            found.setdefault(name, []).append(apart(*make(x, weight.detach().float(), g)))
    return found


# -- the command -----------------------------------------------------------------------------------


def run(seed: int, *, steps: int, threads: int, device: str, folder: Path) -> dict[str, Any]:
    """The curves of a seed, and the errors of its bf16 model. In a process of its own."""
    torch.set_num_threads(threads)
    start = build_model(folder / f"start-{seed}", seed, MODEL)
    examples = demonstrations([(make_env("arithmetic", args=TASK), 1.0)], EXAMPLES, seed)
    spec = read_spec(start)
    samples = encode_all(
        ChatTokenizer(load_tokenizer(start)), examples, spec.vocab_size, spec.max_position
    )
    curves = {}
    for way in WAYS:
        model = model_of(start, way, torch.bfloat16, device)
        curves[way] = curve(model, samples, steps, seed)
        if way == "bf16":
            trained = hf.save(model, folder / f"end-{seed}")
    exact = gradients(model_of(trained, "bf16", torch.float32, device), samples)
    return {
        "seed": seed,
        "curves": curves,
        "gradients": {
            way: by_layer(gradients(model_of(trained, way, torch.bfloat16, device), samples), exact)
            for way in WAYS
        },
        "products": products(model_of(trained, "bf16", torch.bfloat16, device), samples),
    }


def show(runs: list[dict[str, Any]]) -> None:
    """Ends of the curves, and errors: means over seeds and matrices, with the largest."""
    layers = range(MODEL["num_hidden_layers"])
    ends = [
        (way, *(f"{statistics.fmean(one['curves'][way][-LAST:]):.4f}" for one in runs))
        for way in WAYS
    ]
    seeds = ("learner", *(f"seed {one['seed']}" for one in runs))
    print_table(seeds, ends, f"loss, last {LAST} steps")
    errors = [
        (way, *(_told(sum((one["gradients"][way][i] for one in runs), [])) for i in layers))
        for way in WAYS
    ]
    head = ("learner", *(f"layer {i}" for i in layers))
    print_table(head, errors, "error of weights' gradients")
    products = [
        (name, _told(sum((one["products"][name] for one in runs), [])))
        for name in runs[0]["products"]
    ]
    print_table(("product", "error"), products, "error of one product")


def _told(errors: list[float]) -> str:
    return f"{statistics.fmean(errors):.4f} (to {max(errors):.4f})"


def main() -> None:
    parser = parser_of(__doc__, out=RESULTS, steps=120, seeds=3)
    parser.add_argument("--jobs", type=int, default=1, help="seeds side by side")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    context, began = multiprocessing.get_context("spawn"), time.monotonic()
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(args.jobs, mp_context=context) as pool,
    ):
        work = partial(
            run, steps=args.steps, threads=args.threads, device=args.device, folder=Path(scratch)
        )
        runs = list(pool.map(work, range(args.seeds)))
    show(runs)
    args.out.mkdir(parents=True, exist_ok=True)
    seconds = round(time.monotonic() - began)
    record = here(steps=args.steps, device=args.device, seconds=seconds, runs=runs)
    (args.out / "rounding.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
