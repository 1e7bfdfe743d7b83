"""Supervised warm start on demonstrations, before RL.

With y the response of a demonstration, end-of-turn id included, and N the response tokens of the
batch, a step ascends

    J(theta) = 1/N sum over demonstrations sum_t log pi(y_t | x, y_<t)
    sft/loss = -J, in nats a token
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.objectives.reduce import Denominators, aggregate, sequences_of
from lowroll.trainer import state as states
from lowroll.trainer.muon import hidden_matrices
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.packing import PackedBatch, check
from lowroll.trainer.step import PackedForward, refuse_divergence
from lowroll.types import BehaviorTag, PolicySpan, Prompt, Rollout, Sample, Score
from lowroll.weights import derived_tensors

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Demonstration:
    """A prompt as chat messages, the response to learn, and JSON schemas of tools."""

    messages: list[dict[str, str]]
    response: str
    tools: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class SftSettings:
    batch_size: int  # demonstrations an update
    optim: OptimSettings = field(default_factory=OptimSettings)
    tokens_per_microbatch: int = 8192
    logprob_chunk: int = 1024
    seed: int = 0


class SftLearner:
    """A learner from demonstrations. ValueError for those that the model cannot read."""

    def __init__(
        self,
        model: Transformer,
        chat: ChatTokenizer,
        examples: Sequence[Demonstration],
        settings: SftSettings,
    ) -> None:
        self.samples = encode_all(chat, examples, model.spec.vocab_size, model.spec.max_position)
        self.model = model
        self.settings = settings
        self.optimizer = Optimizer(
            model.trainable_parameters(), settings.optim, hidden_matrices(model)
        )
        self._order = epochs(len(self.samples), settings.seed)

    def step(self) -> dict[str, float]:
        """Make one update and return its metrics. TrainingDiverged after MAX_REFUSALS non-finite
        ones in a row."""
        batch = [self.samples[next(self._order)] for _ in range(self.settings.batch_size)]
        return sft_step(self.model, batch, self.optimizer, self.settings)

    def state(self) -> tuple[states.Tensors, dict[str, Any]]:
        """Return the state as `Trainer.state` does."""
        return states.capture(self.model, self.optimizer)

    def restore(
        self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
    ) -> None:
        """Restore `state`. The number of steps gives the position in the demonstrations."""
        states.restore(self.model, self.optimizer, tensors, state)
        num_drawn = self.optimizer.num_steps * self.settings.batch_size
        self._order = itertools.islice(
            epochs(len(self.samples), self.settings.seed), num_drawn, None
        )


def sft_step(
    model: Transformer, samples: Sequence[Sample], optimizer: Optimizer, settings: SftSettings
) -> dict[str, float]:
    """Make one update towards the samples' responses and return its metrics."""
    rate = optimizer.begin_step()
    counts = Denominators(sum(len(sample.rollout.token_ids) for sample in samples), len(samples))

    def likelihood(packed: PackedBatch, learner_N: Tensor) -> Tensor:
        return aggregate(
            learner_N,
            sequences_of(packed.mask_N, packed.segments_N),
            mode="token-mean",
            counts=counts,
        )

    forward = PackedForward(model, samples, settings.tokens_per_microbatch, settings.logprob_chunk)
    trace = forward.run([range(len(samples))], likelihood)
    log_likelihood = sum(values.double().sum().item() for values in trace.log_probs.values())
    loss = -log_likelihood / counts.num_tokens
    metrics = {"sft/loss": loss, "sft/tokens": float(counts.num_tokens), "optim/lr": rate}
    metrics |= optimizer.update(refuse=not math.isfinite(loss))
    derived_tensors.renew(model)
    refuse_divergence("sft: loss", loss, metrics["optim/grad_norm"], optimizer)
    return metrics


def encode_all(
    chat: ChatTokenizer, examples: Sequence[Demonstration], vocab_size: int, context: int
) -> list[Sample]:
    """Convert demonstrations to samples. ValueError for one that exceeds the vocabulary or
    context."""
    if chat.tokenizer.eos_token_id is None:
        raise ValueError("tokenizer: it has no end-of-sequence token, so a response could not end")
    samples = [encode(chat, example) for example in examples]
    check(samples, vocab_size, context)
    return samples


def encode(tokenizer: ChatTokenizer, example: Demonstration) -> Sample:
    """Convert a demonstration: the prompt by the chat template, the response closed by the
    end-of-turn id."""
    response_ids = tokenizer.encode_response(example.response)
    rollout = Rollout(
        response_ids,
        [0.0] * len(response_ids),
        "stop",
        BehaviorTag((PolicySpan(0, ""),), weights="demonstration"),
    )
    return Sample(
        Prompt("demonstration", "sft", example.messages),
        tokenizer.encode_chat(example.messages, tools=example.tools),
        rollout,
        example.response,
        Score(1.0),
        advantage=1.0,
        loss_mask=[1] * len(response_ids),
    )


def epochs(size: int, seed: int) -> Iterator[int]:
    """Yield the indices below `size` endlessly, shuffled by (seed, epoch) alone."""
    if size < 1:
        raise ValueError("examples: there is no demonstration to learn from")
    epoch = 0
    while True:
        order = list(range(size))
        random.Random(f"sft/{seed}/{epoch}").shuffle(order)
        yield from order
        epoch += 1


def read_demonstrations(path: Path) -> list[Demonstration]:
    """Read a JSONL of {"messages": [{"role", "content"}, ...]}: one demonstration for each
    assistant message. ValueError for a row that does not end with the assistant."""
    if not path.is_file():
        raise ValueError(f"sft.data: {path}: no such file")
    examples = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                messages = _parse_messages(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            examples += [
                Demonstration(messages[:position], message["content"])
                for position, message in enumerate(messages)
                if message["role"] == "assistant" and position
            ]
    if not examples:
        raise ValueError(f"{path}: holds no demonstration")
    return examples


def _parse_messages(row: Any) -> list[dict[str, str]]:
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise ValueError('expected {"messages": [...]}')
    for k, message in enumerate(row["messages"]):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError(f'messages[{k}]: expected {{"role": ..., "content": ...}}')
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise ValueError(
                f"messages[{k}]: role must be one of {', '.join(ROLES)}, content a string"
            )
    if len(row["messages"]) < 2 or row["messages"][-1]["role"] != "assistant":
        raise ValueError(
            "messages: a conversation must end with the assistant's response to something"
        )
    return row["messages"]
