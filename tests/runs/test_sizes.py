"""The sizes of a learner's passes that a run leaves open."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowroll.config import RunConfig
from lowroll.config.load import from_mapping
from lowroll.config.schema import SIZES, TrainConfig
from lowroll.kv.capacity import Workload
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.runs.build.compute import Compute
from lowroll.runs.memory import sizes
from lowroll.runs.memory.plan import Plan, Planner

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
    assert tiny.train == last and last.activation_checkpointing is True
    assert last.longest == 512


def test_the_ladder_goes_down_and_never_below_the_longest_sample() -> None:
    steps = list(sizes.ladder(TrainConfig(), 3000))
    assert steps[0] == TrainConfig().sized()
    assert {step.longest for step in steps} == {8192, 4096}
    assert [step.activation_checkpointing for step in steps] == [False] * 4 + [True] * 4


def test_the_bound_gives_way_to_what_even_the_smallest_passes_take() -> None:
    """Ten gigabytes of weights: sizes are not made smaller for a bound that none would meet."""
    steps = list(sizes.ladder(TrainConfig(), 1))

    def plan(train: TrainConfig) -> Plan:
        parts = {"weights": 10 * GB, "activations": train.longest * 100_000}
        return Plan({"learn": parts}, None, "cpu")

    assert sizes.choose(steps, plan) == steps[0]
    none_free = replace(plan(steps[0]), free=0)
    assert sizes.choose(steps, lambda _: none_free) == steps[-1]
