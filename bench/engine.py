"""The engine against `transformers.generate`, and its low-bit weights against its own dense ones.

The work is an RL step's: 8 prompts of 64 tokens, 8 samples each, response lengths log-normal
(median 48, sigma 1, at most 384), the same list of lengths forced on every engine, the same random
weights of a real shape (speed does not depend on the values). All engines sample at temperature 1
and count the useful tokens only: those within a sample's length. Seconds are of the whole call,
prefill included.

    ours            one request a prompt with n = 8; a sample ends by drawing its stop id, which is put in the place
                    of its last token. Log-probs of all tokens are recorded, as always.
    unshared        the same with one request a sample: what is left without running a group's prompt once.
    transformers    float32, SDPA attention, inference mode, num_return_sequences = 8 (no padding: the prompts are
                    equally long), a stopping criterion that ends each row at its length, and the
                    static cache, which is faster here than the default one. The batch runs until
                    its longest row is done, because that is what `generate` does. No log-probs.

    python -m bench.engine [--rounds 3] [--threads 2] [--model demo|100m] [--out FOLDER]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from bench.harness import BASELINES, Row, SomeOf, finish, interleave, parser_of, speed_row
from bench.lengths import Lengths
from lowroll import Engine, Request
from lowroll.engine.runner import StepResult
from lowroll.engine.sequence import StepPlan
from lowroll.model import hf, initialize
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor
from lowroll.runs.demo import CONFIG as DEMO

STOP = 1  # the id that ends a sample
CONTEXT = 512
MODELS: dict[str, dict[str, Any]] = {
    "demo": {**DEMO, "vocab_size": 261, "max_position_embeddings": CONTEXT},
    "100m": {
        **DEMO,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 8192,
        "max_position_embeddings": CONTEXT,
    },
}
FOUR_BITS = ("int4", "nvfp4")


@dataclass(frozen=True)
class Targets:
    """What the ratios of a model must reach, and hope to."""

    peer: float | None = 2.0  # fp32 over transformers
    int8: float | None = None  # over our own fp32
    four: tuple[float | None, float | None] = (None, None)  # 4 bits over our own fp32
    held: float | None = None  # bytes of float32 matrices over those that 4 bits hold


TARGETS = {"demo": Targets(), "100m": Targets(int8=1.5, four=(1.8, 2.5), held=7.0)}


def ours(engine: Engine, work: Lengths, share: bool = True) -> Callable[[], None]:
    """Return a call that runs the workload on our engine.

    share: one request a prompt, whose prompt runs once; otherwise one request a sample, as if all
    prompts differed.
    """
    groups = {
        f"{i}.{j}": (prompt, group)
        for i, (prompt, lengths) in enumerate(zip(work.prompts, work.tokens, strict=True))
        for j, group in enumerate([lengths] if share else [[length] for length in lengths])
    }
    options: dict[str, Any] = {"max_tokens": work.longest, "stop_ids": (STOP,), "ignore_eos": True}
    requests = [
        Request(prompt, n=len(group), seed=7, id=name, **options)
        for name, (prompt, group) in groups.items()
    ]
    draw = engine.runner.run

    def scripted(plan: StepPlan, meanwhile: Callable[[], None]) -> list[StepResult]:
        """Return what the runner drew, with each sample's last token replaced by the stop id, and
        no stop before it."""
        drawn = []
        for row in draw(plan, meanwhile):
            end = groups[row.sequence.request.id][1][row.sequence.sample]
            ids = [STOP + 1 if token == STOP else token for token in row.token_ids]
            last = end - len(row.sequence.token_ids) - 1
            if 0 <= last < len(ids):
                ids[last] = STOP
            drawn.append(replace(row, token_ids=ids))
        return drawn

    def run() -> None:
        engine.pool.clear_prefixes()  # every round prefills its prompts
        with patch.object(engine.runner, "run", scripted):
            groups = engine.generate(requests)
        made = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
        wanted = [length for lengths in work.tokens for length in lengths]
        assert made == wanted, "the engine did not keep to the lengths"

    return run


class EndAtLength(StoppingCriteria):
    """Row i is done after lengths_B[i] tokens."""

    def __init__(self, lengths_B: torch.Tensor, prompt_tokens: int) -> None:
        self.lengths_B, self.prompt_tokens = lengths_B, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] - self.prompt_tokens >= self.lengths_B


def transformers_generate(model: Any, work: Lengths) -> Callable[[], int]:
    """Return a call that runs the workload with `generate` and gives the tokens of its longest
    row."""
    prompts_BT = torch.tensor(work.prompts)
    lengths_B = torch.tensor(work.tokens).flatten()
    stop = StoppingCriteriaList([EndAtLength(lengths_B, prompts_BT.shape[1])])

    def run() -> int:
        with torch.inference_mode():
            out_BT = model.generate(
                prompts_BT,
                attention_mask=torch.ones_like(prompts_BT),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                num_return_sequences=len(work.tokens[0]),
                max_new_tokens=work.longest,
                stopping_criteria=stop,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation="static",
            )
        return int(out_BT.shape[1]) - prompts_BT.shape[1]

    return run


def compare(
    name: str,
    config: dict[str, Any],
    work: Lengths,
    rounds: int,
    targets: Targets,
) -> list[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        hf.save(initialize(Transformer(spec_from_config(config)), seed=0), folder)
        peer = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        master = hf.load(folder, "cpu")
    cache_tokens = sum(map(len, work.tokens)) * (len(work.prompts[0]) + work.longest + 16)
    engines = {
        weights: Engine(master, weights, device="cpu", cache_tokens=cache_tokens)
        for weights in ("fp32", "bf16", "int8", *FOUR_BITS)
    }
    contestants: dict[str, Callable[[], Any]] = {
        "transformers": transformers_generate(peer, work),
        **{weights: ours(engine, work) for weights, engine in engines.items()},
        "unshared": ours(engines["fp32"], work, share=False),
    }
    transformers_generate(peer, work.cut(4))()  # warm-up
    for side in contestants.keys() - {"transformers"}:
        contestants[side]()
    seconds = interleave(contestants, rounds)

    def row(title: str, side: str, other: str, *target: float | None) -> Row:
        ours, peer = seconds[side], seconds[other]
        return speed_row(f"{name}: {title}", work.total, "tokens/s", ours, peer, *target)

    return [
        row("fp32 engine / transformers fp32", "fp32", "transformers", targets.peer),
        row("fp32 engine, prompts not shared / transformers fp32", "unshared", "transformers"),
        row("int8 engine / transformers fp32", "int8", "transformers"),
        row("int8 engine / our fp32 engine", "int8", "fp32", targets.int8),
        row("int8 engine / our bf16 engine", "int8", "bf16"),
        *(
            row(f"{bits} engine / our fp32 engine", bits, "fp32", *targets.four)
            for bits in FOUR_BITS
        ),
        *(held_row(f"{name}: {bits}", engines[bits], targets.held) for bits in FOUR_BITS),
    ]


def held_row(name: str, engine: Engine, least: float | None) -> Row:
    """Return the row of the bytes that an engine which has run holds for its linear layers, codes
    and all that was made of them, beside float32 matrices."""
    weights = [linear.weight for _, linear in engine.model.linears()]
    held = 0
    for q in weights:
        assert isinstance(q, QTensor)
        held += q.nbytes + sum(kept.nbytes for kept in q.packed.values())
    floats = sum(4 * q.shape[0] * q.shape[1] for q in weights)
    title = f"{name} engine, bytes of the linear layers / of float32"
    return Row(title, "MB", held / 1e6, floats / 1e6, floats / held, must=least)


def main() -> int:
    parser = parser_of(__doc__, out=BASELINES, model=SomeOf(MODELS), rounds=3, threads=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[Row] = []
    for name in args.model:
        work = Lengths.drawn(MODELS[name]["vocab_size"], 48, 1.0, 384, rollouts=64, prompt=64)
        rows += compare(name, MODELS[name], work, args.rounds, TARGETS[name])
    title = f"Engine, {args.threads} threads, 64 sequences, 8 a prompt"
    return finish(title, "engine", rows, args.out, rounds=args.rounds)


if __name__ == "__main__":
    raise SystemExit(main())
