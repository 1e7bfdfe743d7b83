"""Every rollout format on the demo's model: what it costs, and how far it is from the dense
weights.

bits      a weight, with the scales of its group
error     ||W - Q(W)|| / ||W|| over all linear weights
KL        of the dense model's next-token distribution to the quantized one's, mean over the tokens of held-out
          demonstrations, nats; activations are quantized too where the format says so
tokens/s  of the engine on CPU on the demo's kind of batch, in turns, median of the rounds
bytes     of the weight files that `lowroll quantize` writes (embeddings and norms stay dense);
          none where a block of the format would reach over two parts of a fused matrix of this
          small model

python -m bench.formats [--rounds 3] [--threads 1] [--out FOLDER]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import RESULTS, here, parser_of, print_table
from lowroll.config import RunConfig
from lowroll.model import hf
from lowroll.model.attention import varlen
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import formats, get_format, quantize
from lowroll.runs.assembly import environments, models
from lowroll.runs.demo import CONFIG, build_model, engine_speed, settings
from lowroll.runs.export import quantize_folder
from lowroll.runs.sft import warm_start
from lowroll.weights.publish import rollout_copy

NUM_TEXTS = 128


def texts(cfg: RunConfig, folder: Path) -> list[list[int]]:
    """Token ids of held-out demonstrations: prompt and gold response."""
    chat = models.tokenizer(folder)
    (env,) = environments.make(cfg.env, cfg.seed).values()
    prompts = [env.prompt(i, "test") for i in range(NUM_TEXTS)]
    return [
        chat.encode_chat(prompt.messages) + chat.encode_response(env.gold(prompt))
        for prompt in prompts
    ]


@torch.inference_mode()
def next_token_logprobs(model: Transformer, texts: list[list[int]]) -> Tensor:
    """Log-softmax of the logits [T, V] at every position of the texts, packed."""
    lengths = [len(text) for text in texts]
    ids_T = torch.tensor([token for text in texts for token in text])
    pos_T = torch.tensor([pos for length in lengths for pos in range(length)])
    hidden_TD = model(ids_T, pos_T, varlen(lengths, model.device))
    return F.linear(hidden_TD, model.lm_head_weight).float().log_softmax(-1)


def weight_error(model: Transformer, format: str) -> float:
    """Relative Frobenius error over all linear weights."""
    weights = [linear.weight.detach() for _, linear in model.linears()]
    wrong = sum(float((w - quantize(w, format).dequantize()).square().sum()) for w in weights)
    return (wrong / sum(float(w.square().sum()) for w in weights)) ** 0.5


def checkpoint_bytes(folder: Path, format: str) -> int | None:
    """Bytes of the quantized folder's weights; None where the model's sizes do not let the fused
    parts be cut."""
    try:
        return quantize_folder(folder, folder.parent / format, format).bytes
    except ValueError as error:
        print(error)
        return None


def measure(cfg: RunConfig, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """One row a format; the dense float32 weights come first."""
    low_bit = [name for name in formats() if not get_format(name).dense]
    speed = engine_speed(cfg, folder, ("fp32", *low_bit), rounds)
    batch, dense = texts(cfg, folder), hf.load(folder)
    truth = next_token_logprobs(dense, batch)
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    rows: list[dict[str, Any]] = [
        {
            "format": "fp32",
            "bits": 32.0,
            "error": 0.0,
            "kl": 0.0,
            "tokens_per_second": speed["fp32"],
            "bytes": weight_bytes,
        }
    ]
    for name in low_bit:
        logp = next_token_logprobs(rollout_copy(hf.load(folder), name, torch.float32), batch)
        rows.append(
            {
                "format": name,
                "bits": get_format(name).bits,
                "error": weight_error(dense, name),
                "kl": float((truth.exp() * (truth - logp)).sum(-1).mean()),
                "tokens_per_second": speed[name],
                "bytes": checkpoint_bytes(folder, name),
            }
        )
    return rows


HEAD = (
    "format",
    "bits a weight",
    "weight error",
    "KL, nats a token",
    "CPU tokens/s",
    "of fp32",
    "checkpoint bytes",
)


def cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The measured rows as text, under HEAD; the first is the dense one."""
    dense = rows[0]["tokens_per_second"]
    return [
        (
            row["format"],
            f"{row['bits']:g}",
            f"{row['error']:.4f}",
            f"{row['kl']:.1e}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / dense:.2f}x",
            "-" if row["bytes"] is None else f"{row['bytes']:,}",
        )
        for row in rows
    ]


def main() -> None:
    """Warm-start the demo's model, measure every format, show and store the table."""
    parser = parser_of(__doc__, out=RESULTS, rounds=3, threads=1, sft_steps=70)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        cfg = settings(Path(scratch), 0, "cpu")
        cfg = cfg.model_copy(
            update={"sft": cfg.sft.model_copy(update={"steps": args.sft_steps, "warmup_steps": 0})}
        )
        warm_start(
            cfg, build_model(Path(scratch) / "untrained", 0, CONFIG), Path(scratch) / "model"
        )
        rows = measure(cfg, Path(scratch) / "model", args.rounds)
    print_table(HEAD, cells(rows), "rollout formats")
    args.out.mkdir(parents=True, exist_ok=True)
    record = here(rounds=args.rounds, sft_steps=args.sft_steps, rows=rows)
    (args.out / "formats.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
