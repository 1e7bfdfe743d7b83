"""What a batch costs as text, as the log of rollouts has it, and as a frame to the trainer: writing and
reading.

    python -m bench.codec

Rows are MB of the message a second of processor time (one thread, which only computes); the note
says milliseconds of a batch.
"""

from __future__ import annotations

import random
import statistics
import struct
import zlib

from bench.harness import BASELINES, Row, SomeOf, finish, parser_of
from bench.worker import timed
from lowroll.transport.codec import decode_batch, encode_batch
from lowroll.transport.frame import pack_batch, unpack_batch
from lowroll.types import Batch, BehaviorTag, Evictions, PolicySpan, Prompt, Rollout, Sample, Score

# name: samples, tokens of each, likeliest tokens told of at each place, whether keys were dropped
BATCHES = {
    "64 x 1k": (64, 1000, 0, False),
    "512 x 4k": (512, 4000, 0, False),
    "64 x 1k, with evictions": (64, 1000, 0, True),
    "16 x 1k, with 20 top log-probs": (16, 1000, 20, False),
}


def batch_of(samples: int, tokens: int, top: int, dropped: bool) -> Batch:
    """Return a batch. Log-probs are float32 values, as an engine's are: as doubles they have 17
    digits."""
    rng = random.Random(0)

    def log_probs(count: int) -> list[float]:
        drawn = [-rng.expovariate(2) for _ in range(count)]
        return list(struct.unpack(f"{count}f", struct.pack(f"{count}f", *drawn)))

    made = []
    for index in range(samples):
        ids = [rng.randrange(150_000) for _ in range(tokens)]
        policy = (PolicySpan(6, "a1" * 32), PolicySpan(7, "b2" * 32, tokens // 2))
        tag = BehaviorTag(policy, "int8", sampler={"temperature": 1.0}, seed=index, request_id="r")
        rollout = Rollout(ids, log_probs(tokens), "stop", tag, stop_reason=2)
        if top:
            rollout.top_logprobs = [
                list(zip(rng.sample(range(150_000), top), log_probs(top), strict=True))
                for _ in range(tokens)
            ]
        if dropped:
            numbers = zlib.compress(rng.randbytes(28 * 4 * tokens // 8))
            rollout.evictions = Evictions(28, 4, (tokens // 2, tokens - 1), numbers)
        prompt = Prompt(f"p{index}", "gsm8k", [{"role": "user", "content": "What? " * 60}])
        mask = [1] * tokens
        made.append(
            Sample(
                prompt, ids[:200], rollout, "word " * tokens, Score(1.0), 0.5, mask, index // 8, 1.0
            )
        )
    return Batch(7, made, 1.0, {f"reward/{index}": rng.random() for index in range(60)})


def rows(name: str, rounds: int) -> list[Row]:
    batch = batch_of(*BATCHES[name])
    text, frame = encode_batch(batch), pack_batch(batch)
    assert decode_batch(text) == unpack_batch(frame) == batch
    sides = {
        "encode": (text, lambda: encode_batch(batch)),
        "decode": (text, lambda: decode_batch(text)),
        "encode a frame": (frame, lambda: pack_batch(batch)),
        "decode a frame": (frame, lambda: unpack_batch(frame)),
    }
    found = []
    for what, (data, run) in sides.items():
        took = statistics.median(timed(run)["cpu"] for _ in range(rounds))
        megabytes = len(data) / 1e6
        note = f"{megabytes:.1f} MB, {1000 * took:.0f} ms a batch"
        found.append(Row(f"{name}: {what}", "MB/s", megabytes / took, note=note))
    return found


def main() -> int:
    parser = parser_of(__doc__, out=BASELINES, batches=SomeOf(BATCHES), rounds=3)
    args = parser.parse_args()
    found = [row for name in args.batches for row in rows(name, args.rounds)]
    return finish("The codec of batches", "codec", found, args.out, rounds=args.rounds)


if __name__ == "__main__":
    raise SystemExit(main())
