"""Decoding on a few CPU cores beside llama.cpp, at the same bits, with one row and with several.

    python -m bench.llama --gguf FILE [--model FOLDER] [--rows 1,16] [--formats q4_1 ...]
                          [--prompt 64] [--new 128] [--rounds 9] [--threads 2] [--out FOLDER]

    ours    greedy, every token's log-prob recorded, in an exact engine (the default of a run on a CPU),
            one engine for each format
    peer    llama.cpp by llama-cpp-python: greedy, no log-probs, its rows in one `llama_batch`, built for
            this processor. Against 4 bits it runs the file's own, against 8 bits Q8_0 that it makes of
            the file. LOWROLL_LLAMA_PYTHON is the Python of an environment that has it; without it the
            peer's columns stay empty

Both sides live at the same time and take turns. Tokens/s are of what follows the first token of a
row, by the clock and by the processor, which says more where other work shares the cores. --gguf is a
file whose linear layers are in 4 bits; --model its folder for ours, where one has been made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.harness import BASELINES, Row, SomeOf, clock_rows, finish, in_turns, parser_of, released
from bench.peer import Peer, PeerFailed
from bench.samples import random_ids
from bench.worker import timed
from lowroll import Engine, Request

# each format of ours, and whether the peer runs Q8_0 instead of the file's own bits
FORMATS = {
    "q4_1": False,
    "nvfp4": False,
    "int4": False,
    "q8_0": True,
    "int8": True,
    "int8_rotated": True,
}
AIMS = {1: 1.5, 16: 3.0}  # tokens/s over the peer's, by rows
WARM = 1  # rounds that are not counted
CALL_S = 600.0
Turn = Mapping[str, float]  # seconds and cpu


def decode(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Turn:
    """Draw `new_tokens` tokens behind each prompt; return the seconds of all but the first, and the
    processor's."""
    engine.pool.clear_prefixes()  # every turn runs its prompts
    for ids in prompts:
        engine.add(Request(ids, max_tokens=new_tokens, temperature=0, ignore_eos=True))
    finished = engine.step()  # all prompts, and the first token of each

    def draw() -> None:
        while len(finished) < len(prompts):
            finished.extend(engine.step())

    turn = timed(draw)
    drawn = {len(rollout.logprobs) for _, group in finished for rollout in group.rollouts}
    assert drawn == {new_tokens}, f"the engine drew {drawn} tokens instead of {new_tokens}"
    return turn


def peer(python: str, args: Any, rows: int, eight_bits: bool) -> Peer:
    settings = {
        "gguf": str(args.gguf),
        "quantize": eight_bits,
        "rows": rows,
        "length": args.prompt + args.new,
        "threads": args.threads,
    }
    return Peer(settings, [python, "-m", "bench.llama_worker"])


def compare(args: Any, format: str, rows: int) -> list[Row]:
    length = args.prompt + args.new
    engine = Engine(
        args.model or args.gguf,
        format,
        device="cpu",
        exact=True,
        max_batch=rows,
        cache_tokens=rows * (length + 16),
    )
    prompts = random_ids(engine.spec.vocab_size, rows, args.prompt).tolist()
    order = {"prompts": prompts, "new_tokens": args.new}
    sides: dict[str, Callable[[], Turn]] = {"ours": partial(decode, engine, prompts, args.new)}
    rounds = partial(in_turns, rounds=args.rounds, warm=WARM, title=f"{format}, {rows} rows, ")
    note = "llama.cpp: LOWROLL_LLAMA_PYTHON names no Python"
    with ExitStack() as stack:
        try:
            if python := os.environ.get("LOWROLL_LLAMA_PYTHON"):
                other = stack.enter_context(peer(python, args, rows, FORMATS[format]))
                sides["peer"] = partial(other.ask, order, "a turn of llama.cpp", CALL_S)
                note = ""
            turns = rounds(sides)
        except PeerFailed as error:
            note = f"llama.cpp: {error}"
            turns = rounds({"ours": sides["ours"]})
    bits = "Q8_0" if FORMATS[format] else "the file's own"
    title = f"{Path(args.gguf).stem} {format} over llama.cpp ({bits}), {rows} rows"
    return clock_rows(title, rows * (args.new - 1), turns, note, aim=AIMS.get(rows))


def main() -> int:
    parser = parser_of(
        __doc__,
        out=BASELINES,
        rows=[1, 16],
        formats=SomeOf(FORMATS),
        prompt=64,
        new=128,
        rounds=9,
        threads=2,
        model=str,
    )
    parser.add_argument("--gguf", type=Path, required=True, help="the file that llama.cpp reads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: list[Row] = []
    for format in args.formats:
        for rows in args.rows:
            with released():
                found += compare(args, format, rows)
    settings = {name: getattr(args, name) for name in ("prompt", "new", "rounds", "threads")}
    return finish("Decoding beside llama.cpp", "llama", found, args.out, **settings)


if __name__ == "__main__":
    raise SystemExit(main())
