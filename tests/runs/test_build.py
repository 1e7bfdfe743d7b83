"""A configuration reaches the rooms: their settings take its keys by name, and no key is lost on the
way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from types import ModuleType
from typing import Any

import pytest

from lowroll.config import RunConfig, from_mapping
from lowroll.config.section import Section
from lowroll.config.train import SIZES
from lowroll.model.spec import spec_from_config
from lowroll.orchestrator.filters import Gibberish, Repetition
from lowroll.orchestrator.temperature import TemperatureSchedule
from lowroll.runs import sft
from lowroll.runs.assembly import orchestrator, trainer
from lowroll.runs.assembly.settings_from_config import Mirror
from tests.fixtures.runs import TINY


class Left(Section):
    both: int = 1
    size: int = 2


class Right(Section):
    both: int = 3
    name: str = "right"


@dataclass(frozen=True)
class Settings:
    both: int
    name: str
    size: int = 7
    extra: int = 8


def test_a_field_comes_from_the_first_section_that_has_its_name() -> None:
    mirror = Mirror(Settings, Left, Right, default=("size",), given=("extra",))
    found = mirror(Left(both=4, size=5), Right(both=6, name="given"), extra=9)
    assert found == Settings(both=4, name="given", size=7, extra=9)
    assert Mirror(Settings, Right, Left, default=("extra",))(Right(), Left()) == Settings(
        both=3, name="right", size=2
    )


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({}, "Settings.extra is a key of none of its sections"),
        ({"default": ("extra", "colour")}, "Settings has no field colour"),
        ({"given": ("exttra",), "default": ("extra",)}, "Settings has no field exttra"),
    ],
)
def test_a_correspondence_that_cannot_hold_is_no_mirror(
    named: dict[str, tuple[str, ...]], told: str
) -> None:
    with pytest.raises(TypeError, match=told):
        Mirror(Settings, Left, Right, **named)


def test_a_mirror_takes_what_it_was_declared_with() -> None:
    mirror = Mirror(Settings, Left, Right, given=("extra",))
    for sections, given in (
        ((Left(), Right()), {}),
        ((Right(), Left()), {"extra": 1}),
        ((Left(), Right()), {"extra": 1, "size": 2}),
    ):
        with pytest.raises(AssertionError):
            mirror(*sections, **given)


OTHER_DEFAULTS = {
    "_EVAL_SAMPLING.temperature",  # evaluation is greedy
    "_SFT_OPTIM.learning_rate",  # a warm start learns faster, and slows down
    "_SFT_OPTIM.lr_scheduler_type",
}


def test_what_nobody_sets_means_the_same_in_a_room_and_in_its_section() -> None:
    found = {name for module in (orchestrator, trainer, sft) for name in other_defaults(module)}
    assert found == OTHER_DEFAULTS


def other_defaults(module: ModuleType) -> Iterator[str]:
    """Keys whose default is not that of the room's field of their name."""
    for name, mirror in vars(module).items():
        if not isinstance(mirror, Mirror):
            continue
        defaults = {field.name: field.default for field in fields(mirror.settings)}
        for key, section in mirror.source.items():
            theirs = mirror.sections[section].model_fields[key].default
            theirs = SIZES.get(key) if theirs is None else theirs
            if defaults[key] not in (MISSING, theirs):
                yield f"{name}.{key}"


def config(**changes: Any) -> RunConfig:
    return from_mapping({"model": "m", **changes}).resolved()


def values(settings: Any) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def test_rollouts_and_evaluations_are_drawn_as_their_sections_say() -> None:
    sampler = {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
    }
    rollout = {**sampler, "max_tokens": 20, "min_tokens": 3, "stop": ["END"]}
    other = {"temperature": 0.3, "top_k": 4, "top_p": 0.8, "min_p": 0.2, "repetition_penalty": 1.1}
    cfg = config(rollout=rollout, eval=other)
    shared = {"max_tokens": 20, "stop_strings": ("END",), "stop_ids": ()}
    assert values(orchestrator.sampling(cfg)) == {**sampler, **shared, "min_tokens": 3}
    assert values(orchestrator.eval_sampling(cfg)) == {**other, **shared, "min_tokens": 0}


def test_the_orchestrator_has_its_sections() -> None:
    dapo = {"max_rounds": 3, "no_signal": "go_on", "overlong_max": 30, "overlong_cache": 6}
    cfg = config(
        seed=11,
        batch_size=12,
        rollouts_per_example=3,
        env=[{"id": "reverse-text", "weight": 2.5}],
        rollout={
            "max_tokens": 32,
            "seed": 7,
            "temp_scheduler": {
                "type": "cosine",
                "start_temperature": 1.1,
                "end_temperature": 0.6,
            },
        },
        algorithm="dapo",
        dapo=dapo,
        score={"max_error_rate": 0.2},
        asynchrony={
            "max_async_level": 2,
            "strict_async_level": True,
            "max_off_policy_steps": 5,
            "oversampling_factor": 1.5,
            "partial": "keep",
        },
        buffer={
            "seed": 3,
            "online_difficulty_filtering": True,
            "easy_threshold": 0.75,
            "hard_threshold": 0.25,
            "easy_fraction": 0.5,
            "hard_fraction": 0.125,
            "hash_keys": ["prompt"],
        },
        filters=[
            {"type": "gibberish", "token_id_threshold": 9, "logprob_offset": 1.5, "enforce": True},
            {"type": "repetition", "window": 7, "prob_threshold": 0.5},
        ],
        train={"max_steps": 40, "tokens_per_microbatch": 64},
    )
    spec = spec_from_config({**TINY, "vocab_size": 99, "max_position_embeddings": 512})
    assert values(orchestrator.settings(cfg, spec)) == {
        "batch_size": 12,
        "rollouts_per_example": 3,
        "sampling": orchestrator.sampling(cfg),
        "temperature_schedule": TemperatureSchedule(1.1, 0.6, 40, "cosine"),
        "seed": 11,
        "sampling_seed": 7,
        "env_weights": {"reverse-text": 2.5},
        "advantage": "grpo",
        "max_prompt_tokens": 32,
        "max_sequence_tokens": 64,
        "dynamic_sampling": True,
        **dapo,
        "filters": (Gibberish(99, 9, 1.5, True), Repetition(7, 0.5, False)),
        "max_error_rate": 0.2,
        "error_window": 50,
        "max_steps": 40,
        "canary_interval": 20,
        "estimator": None,
        "max_async_level": 0,
        "strict_async_level": True,
        "max_off_policy_steps": 5,
        "oversampling_factor": 1.5,
        "partial": "keep",
        "stall_s": 3600.0,
        "buffer_seed": 3,
        "online_difficulty_filtering": True,
        "easy_threshold": 0.75,
        "hard_threshold": 0.25,
        "easy_fraction": 0.5,
        "hard_fraction": 0.125,
        "hash_keys": ("prompt",),
        "skip_verification": False,
    }


def test_the_trainer_has_its_sections() -> None:
    rate = {"learning_rate": 3e-4, "lr_scheduler_type": "linear", "min_lr_ratio": 0.2}
    rate |= {"warmup_steps": 4}
    shared = {"weight_decay": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "max_grad_norm": 0.4}
    shared |= {"optimizer": "muon"}
    sizes = {"minibatches": 2, "tokens_per_microbatch": 4096, "logprob_chunk": 77}
    passes = {"replay_kv": True, "share_prompts": False}
    supervised = {"learning_rate": 2e-4, "lr_scheduler_type": "constant", "min_lr_ratio": 0.1}
    supervised |= {"warmup_steps": 5}
    noise = {"sigma_start": 0.5, "sigma_end": 0.1, "num_stages": 3, "schedule": "linear"}
    noise |= {"variant": "paper"}
    cfg = config(
        seed=5,
        train={**rate, **shared, **sizes, **passes, "max_steps": 30},
        loss={"kl_coef": 0.3, "kl_estimator": "k2"},
        sft={**supervised, "steps": 60, "batch_size": 6},
        noise=noise,
    )
    assert values(trainer.optim(cfg)) == {**rate, **shared, "total_steps": 30}
    learn = values(trainer.learn(cfg))
    assert learn.pop("objective") is not None and learn.pop("options") == cfg.objective_options
    assert learn == {**sizes, **passes, "kl_coef": 0.3, "kl_estimator": "k2"}
    supervised_learn = values(sft.settings(cfg))
    assert values(supervised_learn.pop("optim")) == {**supervised, **shared, "total_steps": 60}
    del sizes["minibatches"]
    assert supervised_learn == {**sizes, "batch_size": 6, "seed": 5}
    assert values(trainer.noise(cfg)) == {**noise, "total_steps": 30, "seed": 5}
