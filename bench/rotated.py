"""What the rotation of INT8 costs: `int8_rotated` over `int8`, in turns in one process.

    rollout     a batch of rollouts of an RL step (`bench.work`): seconds of whole calls
    prompts     as many prompts as a pass over them takes, one token each: prefill
    publish     all linear weights of the master into the engine, in place; milliseconds, CUDA alone

    python -m bench.rotated [--model qwen2.5-7b | FOLDER] [--device auto|cpu|cuda] [--rounds 5]
                            [--out FOLDER]

On a GPU the weights are random and of a model's exact shapes (`bench.shapes`); a folder is a model of
one's own. Rows are added to `rotated.json` (of a CPU: `rotated-cpu.json`).
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

import torch

from bench.harness import BASELINES, Row, finish, parser_of, seconds_of
from bench.shapes import SHAPES, random_model
from bench.turns import Ours, in_turns, tokens_of
from bench.work import Work
from lowroll import Engine
from lowroll.model import hf
from lowroll.model.device import pick_device
from lowroll.model.folder import resolve
from lowroll.model.transformer import Transformer
from lowroll.weights.publish import publish

PAIR = ("int8_rotated", "int8")
ROLLOUTS = {"cuda": (1, 64, 256), "cpu": (1, 16)}  # rows that decode together
MUST = {"cuda": 0.95, "cpu": 0.90}  # of plain INT8's speed
PUBLICATION_MS = 30.0


def works(device: torch.device) -> list[Work]:
    """The rollouts of both parts on a device."""
    if device.type == "cpu":
        return [*(Work(batch, 64, 64) for batch in ROLLOUTS["cpu"]), Work(16, 256, 1, group=1)]
    return [*(Work(batch) for batch in ROLLOUTS["cuda"]), Work(32, 1024, 1, group=1)]


def measure(name: str, master: Transformer, rounds: int) -> list[Row]:
    """Both formats of one model, work by work."""
    device, rows = master.device, list[Row]()
    chosen = works(device)
    tokens = max(work.cache_tokens() for work in chosen)
    engines = {
        format: Engine(master, weights=format, cache_tokens=tokens, max_batch=256)
        for format in PAIR
    }
    sides = {format: Ours(engine) for format, engine in engines.items()}
    for work in chosen:
        runs = {format: partial(side.run, work) for format, side in sides.items()}
        title, must = f"{name} int8_rotated over int8 {work.title}", MUST[device.type]
        rows.append(in_turns(title, tokens_of(work), runs, rounds, must))
    if device.type == "cuda":
        rows.append(publication(name, master, engines, rounds))
    return rows


def publication(name: str, master: Transformer, engines: dict[str, Engine], rounds: int) -> Row:
    """Milliseconds of a publication in place: the median of the rounds after a first one."""
    found: dict[str, list[float]] = {format: [] for format in PAIR}
    for _ in range(rounds + 1):
        for format in PAIR:
            run = partial(publish, master, engines[format].model)
            found[format].append(seconds_of(run, master.device) * 1e3)
    ours, plain = (statistics.median(found[format][1:]) for format in PAIR)
    title = f"{name} int8_rotated over int8 publication"
    return Row(title, "ms", ours, plain, plain / ours, must=PUBLICATION_MS, goal="ours at most")


def main() -> int:
    parser = parser_of(__doc__, out=BASELINES, device="auto", rounds=5)
    parser.add_argument("--model", default="qwen2.5-7b", help="a shape, or a model's folder")
    args = parser.parse_args()
    device = pick_device(args.device)
    if args.model in SHAPES:
        master = random_model(SHAPES[args.model], device)
    else:
        master = hf.load(resolve(args.model), device)
    name = args.model if args.model in SHAPES else Path(args.model).name
    rows = measure(name, master.requires_grad_(False), args.rounds)
    kept = "rotated" if device.type == "cuda" else "rotated-cpu"
    return finish("int8_rotated over int8", kept, rows, args.out)


if __name__ == "__main__":
    raise SystemExit(main())
