"""What a replay keeps of drafts on a real model, and how long a draw takes.

    python -m bench.drafts [--model smollm2] [--device auto] [--source fp32] [--formats bf16 int8 ...]
                           [--changes 1e-3 1e-2] [--tokens 128] [--samples 4] [--out FOLDER]
    python -m bench.drafts --draws [--device auto] [--vocabularies 49152 151936]

Samples of the model in the format of `--source`, temperature 1, are drafts; each of the other policies
draws again at each of their places, with the same noise: the source's own pass over the drafts, those
of the formats, and models whose weights are off by a relative normal of each change. A line a policy:

    distance    mean total variation between its distributions and the source's
    changed     share of the tokens that it draws otherwise. Gumbel noise allows 2 d / (1 + d) at most, d
                the distance of the place
    kept        mean tokens before the first that differs, which a replay keeps, of `--tokens`

With `--draws` instead: microseconds of a draw, the median of many, by rows and filters, of logits that
lie in memory. On a GPU draws run from a graph.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.fidelity import TEXTS
from bench.harness import BASELINES, Row, finish, parser_of, seconds_of
from lowroll.engine.native import NativeEngine
from lowroll.engine.request import noise_key
from lowroll.engine.sampler import signed
from lowroll.kernels.launch import captured, overlapping
from lowroll.kernels.sampling.draw import draw
from lowroll.kernels.sampling.filters import Filters
from lowroll.model import hf
from lowroll.model.attention import varlen
from lowroll.model.device import pick_device
from lowroll.model.folder import resolve
from lowroll.model.tokenizer import ChatTokenizer, load_tokenizer
from lowroll.model.transformer import Transformer
from lowroll.types import Group, Request
from lowroll.weights.publish import publish, rollout_copy

ROWS = (1, 16, 256)
DRAWS = 200  # that are timed


def drafts(
    master: Transformer, source: str, folder: Path, samples: int, tokens: int
) -> list[Group]:
    """Samples of the model in a format."""
    chat = ChatTokenizer(load_tokenizer(folder))
    asked = [chat.encode_chat([{"role": "user", "content": question}]) for question, _ in TEXTS]
    requests = [
        Request(ids, n=samples, max_tokens=tokens, ignore_eos=True, seed=3, id=str(i))
        for i, ids in enumerate(asked)
    ]
    cache = sum(len(r.prompt_ids) + samples * (tokens + 16) for r in requests) + 1024
    with closing(NativeEngine(master, source, cache_tokens=cache, max_batch=16)) as engine:
        return engine.generate(requests)


def again(model: Transformer, group: Group) -> tuple[Tensor, Tensor]:
    """What a policy draws at each place of a group's drafts, [N, S], and its distributions [N, S, V]."""
    prompt, tokens, places = group.request.prompt_ids, list[Tensor](), list[Tensor]()
    for sample, rollout in enumerate(group.rollouts):
        ids_T = torch.tensor(prompt + rollout.token_ids, device=model.device)[:-1]
        pos_T = torch.arange(len(ids_T), device=model.device)
        hidden_TD = model(ids_T, pos_T, varlen([len(ids_T)], model.device))
        logits_SV = model.logits(hidden_TD[len(prompt) - 1 :]).float()
        key_S = torch.full_like(pos_T[len(prompt) - 1 :], signed(noise_key(group.request, sample)))
        tokens.append(draw(logits_SV, key_S, pos_T[len(prompt) - 1 :] + 1)[0])
        places.append(logits_SV.softmax(-1))
    return torch.stack(tokens), torch.stack(places)


def off_by(master: Transformer, change: float) -> Transformer:
    """A copy all of whose matrices are off by a relative normal."""
    moved = copy.deepcopy(master)
    generator = torch.Generator(device=moved.device).manual_seed(1)
    for p in moved.parameters():
        if p.ndim > 1:
            p.data.mul_(1 + change * torch.randn(p.shape, generator=generator, device=p.device))
    return policy(moved, "fp32")


def policy(master: Transformer, format: str) -> Transformer:
    """The engine's model in a format."""
    model = rollout_copy(master, format, torch.bfloat16 if format == "bf16" else torch.float32)
    publish(master, model)
    return model


@torch.inference_mode()
def measure(
    name: str,
    source: Transformer,
    groups: list[Group],
    policies: dict[str, Callable[[], Transformer]],
) -> list[Row]:
    """Distance, changed and kept of each policy."""
    rows = list[Row]()
    there = [again(source, group)[1] for group in groups]
    for title, make in policies.items():
        model = make()
        distances, changes, kept = list[float](), list[float](), list[int]()
        for group, there_NSV in zip(groups, there, strict=True):
            tokens_NS, p_NSV = again(model, group)
            drawn = [rollout.token_ids for rollout in group.rollouts]
            same_NS = tokens_NS == torch.tensor(drawn, device=model.device)
            distances += ((p_NSV - there_NSV).abs().sum(-1) / 2).flatten().tolist()
            changes += (~same_NS).float().flatten().tolist()
            kept += same_NS.long().cumprod(-1).sum(-1).tolist()
        found = {"distance": distances, "changed": changes, "kept": kept}
        for what, values in found.items():
            unit = "tokens" if what == "kept" else "of 1"
            rows.append(Row(f"{name} {title}: {what}", unit, statistics.mean(values)))
        numbers = ", ".join(f"{what} {statistics.mean(v):.4g}" for what, v in found.items())
        print(f"{title}: {numbers}", flush=True)
    return rows


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a call, the median; on a GPU of a graph of twenty."""
    each = 20 if device.type == "cuda" else 1

    def several() -> None:
        with overlapping(device):
            for _ in range(each):
                work()

    several()
    run = captured(several).replay if device.type == "cuda" else several
    seconds = []
    for _ in range(DRAWS):
        seconds.append(seconds_of(run, device) / each)
    return 1e6 * statistics.median(seconds)


@torch.inference_mode()
def draws(device: torch.device, vocabularies: Sequence[int]) -> list[Row]:
    """Draws of normal logits, as flat as a small model's."""
    rows = list[Row]()
    for vocab in vocabularies:
        for count in ROWS:
            logits_BV = (torch.randn(count, vocab) * 3).to(device)
            noise_B = torch.arange(count, device=device)
            settings = torch.ones(count, device=device), torch.zeros_like(noise_B).bool()
            asked = Filters(
                torch.full((count,), 50, device=device),
                torch.full((count,), 0.95, dtype=torch.float64, device=device),
                torch.full((count,), -torch.inf, dtype=torch.float64, device=device),
            )
            for title, filters in (("plain", None), ("top-p + top-k", asked)):
                us = timed(partial(draw, logits_BV, noise_B, noise_B, *settings, filters), device)
                rows.append(Row(f"draw V={vocab} B={count} {title}", "us", us))
                print(f"{rows[-1].name}: {us:.1f} us", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(
        __doc__,
        out=BASELINES,
        model="smollm2",
        device="auto",
        source="fp32",
        tokens=128,
        samples=4,
        draws=False,
    )
    parser.add_argument("--formats", nargs="*", default=["bf16", "int8_rotated", "int8"])
    parser.add_argument("--changes", nargs="*", type=float, default=[1e-3, 1e-2])
    parser.add_argument("--vocabularies", nargs="*", type=int, default=[49152, 151936])
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    if args.draws:
        rows = draws(device, args.vocabularies)
    else:
        folder = resolve(args.model)
        master = hf.load(folder, device, torch.float32).requires_grad_(False)
        groups = drafts(master, args.source, folder, args.samples, args.tokens)
        source = policy(master, args.source)
        policies: dict[str, Callable[[], Transformer]] = {"its own pass": lambda: source}
        for format in args.formats:
            policies[format] = partial(policy, master, format)
        for change in args.changes:
            policies[f"off by {change:g}"] = partial(off_by, master, change)
        rows = measure(f"{args.model} {args.source}", source, groups, policies)
    return finish("drafts", "drafts" if device.type == "cpu" else "drafts-gpu", rows, args.out)


if __name__ == "__main__":
    raise SystemExit(main())
