"""Every model family beside Qwen3 on a CPU: the time that a parameter takes.

Models of one width and depth, made from the table of families with random weights in float32. A mixture
of experts is compared with Qwen3-MoE, any other with Qwen3, in turns:

    decode     16 requests of 8 tokens make 33 tokens each; 32 steps of all rows are counted
    prefill    8 prompts of 128 tokens
    learn      a step of GRPO on 8 rows of 64 tokens, forward, backward and AdamW

A row is parameters of a token times tokens a second, and its ratio to the reference: 0.83 is 20 % more
time. The parameters are those of the token's matrices and of the experts that it goes to; in decoding of
all experts, since the rows of a step read nearly all. Windows are longer than the sequences.

    python -m bench.families [--families NAME ...] [--rounds 3] [--threads 2] [--out FOLDER]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.harness import (
    BASELINES,
    Results,
    Row,
    SomeOf,
    interleave,
    parser_of,
    released,
    speed_row,
)
from bench.lengths import Lengths
from bench.lengths import run as generate
from bench.train import Job, step_of
from lowroll import Engine
from lowroll.model import initialize
from lowroll.model.experts import Experts
from lowroll.model.families.table import FAMILIES
from lowroll.model.spec import ModelSpec, spec_from_config
from lowroll.model.transformer import Transformer

MUST = 0.83
DENSE, MIXTURE = "qwen3", "qwen3_moe"
EXPERTS, CHOSEN = 8, 2
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "sliding_window": 1024,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), EXPERTS),
    "num_experts_per_tok": CHOSEN,
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 1024),
    "linear_num_key_heads": 12,  # of delta nets, as wide as in Qwen3.5-0.8B
    "linear_num_value_heads": 12,
    "q_lora_rank": 384,  # of latent attention
    "kv_lora_rank": 192,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "residual_multiplier": 0.5,
}
ROWS, STEPS = 16, 32
PROMPTS, LENGTH = 8, 128
LEARNT = 64  # tokens of a row


def spec_of(family: str) -> ModelSpec:
    """Return a family in the common sizes."""
    named = {
        "model_type": family,
        "architectures": [FAMILIES[family].architecture],
        "mlp_layer_types": ["sparse"] * SIZES["num_hidden_layers"],
    }
    return spec_from_config({**SIZES, **named})


def model_of(family: str) -> Transformer:
    """Return a model of a family in the common sizes, with random weights."""
    return initialize(Transformer(spec_of(family)), seed=0)


def parameters_of_a_token(model: Transformer, share: float) -> float:
    """Return the numbers of the matrices that a token is multiplied by, without the embedding that it
    is looked up in, and with this share of the experts."""
    experts = [layer for layer in model.modules() if isinstance(layer, Experts)]
    stacks = [stack for layer in experts for stack in (layer.gate_up, layer.down)]
    routed = sum(p.numel() for stack in stacks for p in stack.parameters() if p.ndim > 1)
    head = model.spec.vocab_size * model.spec.hidden_size
    blocks = sum(p.numel() for p in model.blocks.parameters() if p.ndim > 1)
    return head + blocks - routed * (1 - share)


def work_of(model: Transformer) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return each part's tokens and a call that does it."""
    decode = Lengths([[i] * 8 for i in range(ROWS)], [[STEPS + 1]] * ROWS)
    prefill = Lengths([[i + j for j in range(LENGTH)] for i in range(PROMPTS)], [[1]] * PROMPTS)
    engine = Engine(model, "fp32", device="cpu", cache_tokens=2 * PROMPTS * LENGTH)
    job = Job("", SIZES, False, PROMPTS, LEARNT, "cpu", torch.float32)
    learner = model.train().requires_grad_(True)
    step = step_of(job, learner, PROMPTS * (LEARNT + 1))
    return {
        "decode": (ROWS * STEPS, partial(generate, engine, decode)),
        "prefill": (PROMPTS * LENGTH, partial(generate, engine, prefill)),
        "learn": (job.tokens, step),
    }


def compared(family: str, reference: str, rounds: int) -> list[Row]:
    """Return a family's rows beside its reference's."""
    models = {"family": model_of(family), "reference": model_of(reference)}
    works = {side: work_of(model) for side, model in models.items()}
    rows = []
    for part, (tokens, _) in works["family"].items():
        runs = {side: works[side][part][1] for side in models}
        seconds = interleave(runs, rounds, warm=1)
        share = 1.0 if part == "decode" else CHOSEN / EXPERTS
        ours, peer = (
            [one / parameters_of_a_token(model, share) * 1e9 for one in seconds[side]]
            for side, model in models.items()
        )
        name = f"{family}: {part} / {reference}"
        rows.append(speed_row(name, tokens, "G parameters/s", ours, peer, MUST))
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Compare the families and store their rows."""
    others = [name for name in FAMILIES if name not in (DENSE, MIXTURE)]
    parser = parser_of(__doc__, out=BASELINES, families=SomeOf(others), rounds=3, threads=2)
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    results = Results("families", args.out, rounds=args.rounds, threads=args.threads)
    for family in args.families:
        reference = MIXTURE if spec_of(family).mixture.num_experts else DENSE
        with released():
            results.add(compared(family, reference, args.rounds))
    return results.finish(f"Families, {args.threads} threads, float32")


if __name__ == "__main__":
    raise SystemExit(main())
