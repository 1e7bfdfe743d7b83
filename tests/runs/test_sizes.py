"""The sizes of a learner's passes that a run leaves open."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowroll.config import RunConfig
from lowroll.config.load import from_mapping
from lowroll.config.train import SIZES, TrainConfig
from lowroll.kv.capacity import Workload
from lowroll.model import lora
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer, initialize
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.memory import sizes
from lowroll.runs.memory.plan import MemoryPlan, Planner
from lowroll.trainer import recompute
from lowroll.trainer.step import PackedForward
from lowroll.types import BehaviorTag, PolicySpan, Prompt, Rollout, Sample, Score
from lowroll.weights.publish import quantize_base

SMOL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
GB = 10**9


def config(**train: object) -> RunConfig:
    tree = {
        "model": "m",
        "device": "cpu",
        "batch_size": 32,
        "rollouts_per_example": 4,
        "rollout": {"weights": "int8", "max_tokens": 200},
        "train": {"lora": True} | train,
    }
    return from_mapping(tree).resolved()


def planner(layers: int = 30, free: int = 20 * GB, device: str = "cpu") -> Planner:
    shapes = Transformer(spec_from_config(SMOL | {"num_hidden_layers": layers}), "meta")
    compute = Compute(torch.device(device), torch.float32)
    return Planner(compute, shapes, [Workload(8, 4, 70, 200)], {}, free)


def sized(cfg: RunConfig) -> tuple[object, ...]:
    return tuple(getattr(cfg.train, key) for key in SIZES)


def test_a_real_model_stays_under_the_bound_and_the_run_says_so() -> None:
    """32 samples of 270 tokens: 8.1 GB of activations if they all went through at once."""
    found = sizes.chosen(planner(), config())
    tokens, again, chunk = sized(found)
    assert tokens in (1024, 2048) and again is False and chunk in (256, 1024)
    whole, now = (planner().plan(each) for each in (config().sized(), found))
    assert sizes.resident(whole) > 2 * sizes.CPU_BYTES > 2 * sizes.resident(now)
    (note,) = set(found.notes) - set(config().notes)
    assert f"train.tokens_per_microbatch: {tokens}" in note and "chosen for a CPU" in note
    assert "instead of" in note


def test_a_chosen_size_leaves_the_longest_sample_as_it_was() -> None:
    """Smaller passes are how samples are packed: which prompts a run learns from is not theirs."""
    found = sizes.chosen(planner(), config())
    assert found.train.together < config().train.together == found.train.longest
    assert config(tokens_per_microbatch=512).train.longest == 512


def test_a_run_whose_batch_fits_and_one_on_a_gpu_are_left_alone() -> None:
    small = sizes.chosen(planner(layers=2), config())
    assert sized(small) == tuple(SIZES.values()) and small.notes == config().notes
    assert sized(config().sized()) == tuple(SIZES.values())
    gpu = sizes.chosen(planner(device="cuda"), config())
    assert sized(gpu) == tuple(SIZES.values())


@pytest.mark.parametrize(
    "given",
    [
        {"tokens_per_microbatch": 8192},
        {"activation_checkpointing": False},
        {"logprob_chunk": 1024},
        {"tokens_per_microbatch": 8192, "logprob_chunk": 1024, "activation_checkpointing": False},
    ],
)
def test_what_the_settings_say_stays(given: dict[str, object]) -> None:
    found = sizes.chosen(planner(), config(**given))
    assert {key: getattr(found.train, key) for key in given} == given
    if "tokens_per_microbatch" in given and len(given) == 1:
        assert found.train.activation_checkpointing is True  # the last resort


def test_little_free_memory_asks_for_more_and_no_choice_is_the_smallest() -> None:
    ample = sizes.chosen(planner(), config())
    tight = sizes.chosen(planner(free=11 * GB // 10), config())
    assert sized(tight) != sized(ample)
    tiny = sizes.chosen(planner(free=GB // 100), config())
    *_, last = sizes.ladder(config().train, 270)
    assert tiny.train.model_dump() == last.model_dump() and last.activation_checkpointing is True
    assert last.longest == 512


def test_the_ladder_goes_down_and_never_below_the_longest_sample() -> None:
    steps = list(sizes.ladder(TrainConfig(), 3000))
    assert steps[0] == TrainConfig().sized()
    assert {step.longest for step in steps} == {8192, 4096}
    assert [step.activation_checkpointing for step in steps] == [False] * 4 + [True] * 4


def test_the_bound_gives_way_to_what_even_the_smallest_passes_take() -> None:
    """Ten gigabytes of weights: sizes are not made smaller for a bound that none would meet."""
    steps = list(sizes.ladder(TrainConfig(), 1))

    def plan(train: TrainConfig) -> MemoryPlan:
        parts = {"weights": 10 * GB, "activations": train.longest * 100_000}
        return MemoryPlan({"learn": parts}, None, "cpu")

    assert sizes.choose(steps, plan) == steps[0]
    none_free = replace(plan(steps[0]), free=0)
    assert sizes.choose(steps, lambda _: none_free) == steps[-1]


@pytest.mark.parametrize("sizes_", [(64, 16, False), (64, 16, True), (1 << 13, 1 << 10, True)])
def test_smaller_passes_have_the_same_gradient(sizes_: tuple[int, int, bool]) -> None:
    """Of an adapter on an int8 base that is wide enough for every product of bytes: the sum over
    micro-batches is that of one within float32's rounding, and blocks that are made again change no
    bit of it."""
    whole = gradients(1 << 13, 1 << 10, False)
    for got, want in zip(gradients(*sizes_), whole, strict=True):
        if sizes_[0] > 64:
            assert torch.equal(got, want)
        assert (got - want).abs().max() <= 2e-5 * want.abs().max()


def gradients(tokens: int, chunk: int, again: bool) -> list[torch.Tensor]:
    wide = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8}
    wide |= {"num_key_value_heads": 4}
    spec = spec_from_config(SMOL | wide | {"num_hidden_layers": 2, "vocab_size": 300})
    model = quantize_base(initialize(Transformer(spec), seed=0), "int8")
    lora.attach(model, 4, 8.0, seed=0)
    generator = torch.Generator().manual_seed(0)
    for p in model.trainable_parameters().values():
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    recompute.apply(model, again)
    tag = BehaviorTag((PolicySpan(0, ""),), "int8")
    samples = []
    for i in range(6):
        ids = torch.randint(300, (20 + 3 * i,), generator=generator).tolist()
        rollout = Rollout(ids[8:], [-5.0] * len(ids[8:]), "length", tag)
        prompt = Prompt(f"p{i}", "env", [])
        samples.append(Sample(prompt, ids[:8], rollout, "", Score(1.0), 1.0, [1] * len(ids[8:]), 0))
    forward = PackedForward(model, samples, tokens, chunk)
    forward.run([range(6)], lambda packed, learner_N: learner_N.sum())
    return [p.grad for p in model.trainable_parameters().values() if p.grad is not None]
