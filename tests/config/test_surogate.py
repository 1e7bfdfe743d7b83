"""The Surogate document's three files load as written there, and every key of its tables is
known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowroll.config import ConfigError, RunConfig, load
from lowroll.config.surogate.read import load_surogate
from tests.fixtures.quick_start import INFER, ORCH, TRAIN

# The values of the document's quick start.
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Every key of the document's reference tables at its default ("---" and "(required)" left out or
# given a value).
TRAIN_KEYS: list[tuple[str, Any]] = [
    ("gpus", 1),
    ("sequence_len", 2048),
    ("learning_rate", 2e-4),
    ("max_steps", -1),
    ("gradient_accumulation_steps", 4),
    ("per_device_train_batch_size", 2),
    ("optimizer", "adamw_8bit"),
    ("recipe", "bf16"),
    ("lora", True),
    ("lora_rank", 16),
    ("output_dir", "output"),
    ("zero_level", 1),
    ("qlora_fp8", False),
    ("qlora_bnb", False),
    ("qlora_fp4", False),
    ("transport_type", "filesystem"),
    ("max_async_level", 1),
    ("loss.ratio_type", "token"),
    ("loss.kl_tau", 0.0),
    ("loss.adv_tau", 1.0),
    ("loss.teacher_tau", 0.0),
    ("loss.token_mask_low", 0.125),
    ("loss.token_mask_high", 8.0),
    ("loss.geo_mask_low", 0.1),
    ("loss.geo_mask_high", 10.0),
    ("loss.sequence_mask_low", 0.0),
    ("loss.sequence_mask_high", 100.0),
    ("loss.sequence_clip_high", 10.0),
    ("noise_scheduler.enabled", False),
    ("noise_scheduler.sigma_start", 5e-2),
    ("noise_scheduler.sigma_end", 5e-4),
    ("noise_scheduler.num_stages", 10),
]
INFER_KEYS: list[tuple[str, Any]] = [
    ("model", "Qwen/Qwen3-0.6B"),
    ("host", None),
    ("port", 8000),
    ("dtype", "auto"),
    ("max_model_len", None),
    ("enforce_eager", False),
    ("trust_remote_code", False),
    ("tp", 1),
    ("dp", 1),
    ("enable_lora", True),
    ("max_lora_rank", None),
    ("max_loras", 8),
    ("max_cpu_loras", 100),
    ("enable_prefix_caching", None),
    ("gpu_memory_utilization", 0.9),
    ("weight_broadcast_type", "filesystem"),
    ("reasoning_parser", None),
    ("enable_auto_tool_choice", False),
    ("rope_scaling", None),
]
ORCH_KEYS: list[tuple[str, Any]] = [
    ("model.name", None),
    ("batch_size", 128),
    ("rollouts_per_example", 1),
    ("seq_len", 2048),
    ("max_steps", None),
    ("max_async_level", 1),
    ("max_off_policy_steps", 8),
    ("oversampling_factor", 1.0),
    ("output_dir", "outputs/run_default"),
    ("seed", 42),
    ("sampling.max_tokens", None),
    ("sampling.temperature", 1.0),
    (
        "sampling.temp_scheduler",
        {"type": "linear", "start_temperature": 1.0, "end_temperature": 0.6},
    ),
    ("sampling.repetition_penalty", 1.0),
    ("sampling.min_tokens", 0),
    ("sampling.seed", None),
    ("env", [{"id": "reverse-text", "name": None, "args": {}, "address": None}]),
    ("client.base_url", ["http://localhost:8000/v1"]),
    ("client.timeout", 1200),
    ("client.api_key_var", "VLLM_API_KEY"),
    ("client.skip_model_check", False),
    ("client.elastic.port", 8000),
    ("client.elastic.sync_interval", 5.0),
    ("buffer.seed", None),
    ("buffer.online_difficulty_filtering", False),
    ("buffer.easy_threshold", None),
    ("buffer.hard_threshold", None),
    ("buffer.easy_fraction", 0.0),
    ("buffer.hard_fraction", 0.0),
    ("buffer.hash_keys", ["task", "prompt"]),
    ("buffer.skip_verification", False),
    ("buffer.env_ratios", None),
    ("advantage.type", "default"),
    ("advantage.length_weighted_mean", False),
    ("advantage.import_path", None),
    ("advantage.kwargs", {}),
    (
        "filters",
        [
            {
                "type": "gibberish",
                "enforce": False,
                "token_id_threshold": 100000,
                "logprob_offset": 2.0,
            },
            {"type": "repetition", "enforce": False, "window": 3000, "prob_threshold": 0.99},
        ],
    ),
    ("ckpt.interval", None),
    ("ckpt.resume_step", None),
    ("ckpt.wait_for_weights_timeout", None),
    ("ckpt.keep_last", None),
    ("ckpt.keep_interval", None),
    ("ckpt.skip_progress", False),
    ("ckpt.skip_buffer", False),
    (
        "eval",
        {
            "env": [{"id": "reverse-text"}],
            "num_examples": -1,
            "rollouts_per_example": 1,
            "interval": 100,
            "eval_base_model": True,
            "skip_eval_on_resume": True,
            "cancel_inflight_rollouts_on_eval": False,
        },
    ),
    ("report_to.project", "Surogate"),
    ("report_to.name", None),
    ("report_to.offline", False),
    ("report_to.samples", None),
    ("report_to.distributions", None),
    ("report_to.interval", 10),
    ("rollout_transport.type", "filesystem"),
    ("rollout_transport.host", "localhost"),
    ("rollout_transport.port", 5555),
    ("rollout_transport.hwm", 10),
    ("weight_broadcast.type", "filesystem"),
    ("weight_broadcast.host", "localhost"),
    ("weight_broadcast.port", 29501),
    ("weight_broadcast.timeout", 1200),
]
TABLES = {"train": TRAIN_KEYS, "infer": INFER_KEYS, "orch": ORCH_KEYS}
LEAST: dict[str, dict[str, Any]] = {
    "train": {"model": "Qwen/Qwen3-0.6B"},
    "infer": {},
    "orch": {"env": [{"id": "reverse-text"}]},
}


@pytest.fixture
def three(tmp_path: Path) -> Callable[..., RunConfig]:
    def three(
        train: str = TRAIN, infer: str = INFER, orch: str = ORCH, overrides: Any = ()
    ) -> RunConfig:
        for name, text in (("train", train), ("infer", infer), ("orch", orch)):
            (tmp_path / f"{name}.yaml").write_text(text)
        try:
            return load_surogate(
                *(tmp_path / f"{name}.yaml" for name in ("train", "infer", "orch")), overrides
            )
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{tmp_path}/", "")) from None

    return three


def nested(pairs: list[tuple[str, Any]], start: dict[str, Any]) -> dict[str, Any]:
    tree = {**start}
    for key, value in pairs:
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def test_the_quick_start_loads_as_written(three: Callable[..., RunConfig]) -> None:
    cfg = three()
    assert (cfg.model, cfg.seed, cfg.output_dir) == ("Qwen/Qwen3-0.6B", 42, "outputs/run_default")
    assert (cfg.batch_size, cfg.rollouts_per_example, cfg.num_groups) == (128, 16, 8)
    assert (cfg.rollout.weights, cfg.rollout.max_tokens, cfg.rollout.temperature) == (
        "dense",
        128,
        1.0,
    )
    assert [(env.id, env.name, env.weight) for env in cfg.env] == [
        ("reverse-text", "reverse-text", 1.0)
    ]
    train = cfg.train
    assert (
        train.max_steps,
        train.learning_rate,
        train.lr_scheduler_type,
        train.tokens_per_microbatch,
    ) == (40, 2e-4, "constant", 2048)
    assert (train.lora, train.lora_rank, train.lora_alpha, list(train.lora_target_modules)) == (
        True,
        16,
        32.0,
        MODULES,
    )
    assert (train.max_grad_norm, train.weight_decay) == (1.0, 0.01)
    assert (
        cfg.algorithm,
        cfg.advantage,
        cfg.correction,
        cfg.loss.aipo.token_mask_high,
        cfg.loss.reduce,
    ) == ("grpo_no_std", "grpo_no_std", "aipo", 8.0, "token-mean")
    told = "\n".join(cfg.notes)
    assert told.count("AIPO") == 1
    assert cfg.train.forward == "fp8" and cfg.asynchrony.max_async_level == 1
    assert "no effect in one process" not in told and "warning" not in told


def test_one_file_with_three_sections_is_the_same_run(
    three: Callable[..., RunConfig], tmp_path: Path
) -> None:
    def section(name: str, text: str) -> str:
        return f"{name}:\n" + "".join(f"  {line}\n" for line in text.splitlines())

    path = tmp_path / "one.yaml"
    path.write_text(section("train", TRAIN) + section("infer", INFER) + section("orch", ORCH))
    assert load(path).dump() == three().dump()
    path.write_text(section("train", TRAIN).replace("gpus", "gpsu") + section("orch", ORCH))
    with pytest.raises(
        ConfigError, match=r"one\.yaml:4: train\.gpsu: unknown key \(did you mean gpus\?\)"
    ):
        load(path)
    path.write_text(section("train", TRAIN) + section("orch", ORCH) + "seed: 3\n")
    with pytest.raises(ConfigError, match=r"one\.yaml:48: seed: unknown key beside the sections"):
        load(path)
    path.write_text(section("infer", INFER) + section("orch", ORCH))
    with pytest.raises(ConfigError, match=r"one\.yaml: train: this section is required"):
        load(path)


def test_the_examples_in_three_files_load() -> None:
    folder = Path(__file__).parents[2] / "examples" / "three_files"
    cfg = load_surogate(
        folder / "train.yaml", folder / "infer.yaml", folder / "orch.yaml", ["rollout.weights=int8"]
    )
    assert cfg.rollout.weights == "int8"
    assert not [note for note in cfg.notes if note.startswith("warning")]
    assert (
        load_surogate(folder / "train.yaml", None, folder / "orch.yaml").rollout.weights == "dense"
    )


@pytest.mark.parametrize(
    ("file", "key", "value"), [(file, *pair) for file, table in TABLES.items() for pair in table]
)
def test_every_key_is_accepted_at_its_default(
    three: Callable[..., RunConfig], file: str, key: str, value: Any
) -> None:
    files = {
        name: repr(nested([(key, value)] if name == file else [], least))
        .replace("None", "null")
        .replace("True", "true")
        .replace("False", "false")
        for name, least in LEAST.items()
    }
    assert three(**files, overrides=["rollouts_per_example=8"]).train.learning_rate == 2e-4


def test_a_group_of_one_is_refused(three: Callable[..., RunConfig]) -> None:
    """The documented default has no baseline."""
    for text, place in (
        ("env: [{id: reverse-text}]", "orch.yaml: rollouts_per_example (default)"),
        ("env: [{id: reverse-text}]\nrollouts_per_example: 1", "orch.yaml:2: rollouts_per_example"),
    ):
        with pytest.raises(ConfigError) as error:
            three(orch=text)
        assert str(error.value).startswith(
            f"{place}: one rollout has no group that grpo_no_std could compare it with"
        )


def test_all_keys_together(three: Callable[..., RunConfig]) -> None:
    files = {
        name: repr(nested(table, LEAST[name]))
        .replace("None", "null")
        .replace("True", "true")
        .replace("False", "false")
        for name, table in TABLES.items()
    }
    cfg = three(**files, overrides=["rollouts_per_example=8"])
    assert (cfg.batch_size, cfg.rollouts_per_example, cfg.seed, cfg.train.max_steps) == (
        128,
        8,
        42,
        100,
    )
    assert (cfg.train.tokens_per_microbatch, cfg.rollout.max_tokens) == (4096, 1024)
    assert (
        cfg.rollout.temp_scheduler is not None and cfg.rollout.temp_scheduler.end_temperature == 0.6
    )
    assert [(rule.type, rule.window) for rule in cfg.filters] == [
        ("gibberish", 3000),
        ("repetition", 3000),
    ]
    assert (cfg.eval.interval, cfg.eval.num_examples, cfg.eval.env and cfg.eval.env[0].id) == (
        100,
        None,
        "reverse-text",
    )
    told = "\n".join(cfg.notes)
    for expected in (
        "no max_steps in either file",
        "sampling.max_tokens is not set: 1024",
        "ckpt.interval is not set: 50",
    ):
        assert expected in told
    assert cfg.train.optimizer == "adamw8bit"
    assert three().train.optimizer == "adamw"


def test_the_teacher_is_an_override(three: Callable[..., RunConfig]) -> None:
    train = (
        TRAIN.replace("teacher_tau: 0.0", "teacher_tau: 0.5")
        if "teacher_tau" in TRAIN
        else (TRAIN.replace("kl_tau: 0.0", "teacher_tau: 0.5"))
    )
    cfg = three(train=train, overrides=["train.teacher=some/teacher"])
    assert cfg.loss.aipo.teacher_tau == 0.5 and cfg.train.teacher == "some/teacher"


def test_the_noise_scheduler_is_our_noise(three: Callable[..., RunConfig]) -> None:
    assert three().noise is None
    cfg = three(train=TRAIN + "noise_scheduler: {enabled: true}\n")
    assert cfg.noise is not None and cfg.noise.model_dump() == {
        "sigma_start": 5e-2,
        "sigma_end": 5e-4,
        "num_stages": 10,
        "schedule": "exponential",
        "variant": "code",
        "learner": "clean",
    }
    cfg = three(
        train=TRAIN + "noise_scheduler: {enabled: true, sigma_start: 0.01, num_stages: 4}\n"
    )
    assert cfg.noise is not None and (cfg.noise.sigma_start, cfg.noise.num_stages) == (0.01, 4)
    assert not any("noise_scheduler (" in note for note in cfg.notes)


def test_values_that_travel(three: Callable[..., RunConfig]) -> None:
    orch = ORCH.replace("  - id: reverse-text", "  - {id: a, args: {x: 1}}\n  - {id: b, name: c}")
    cfg = three(
        orch=orch
        + "  min_tokens: 3\nbuffer: {env_ratios: [3, 1]}\nadvantage: {length_weighted_mean: true}\n"
        "ckpt: {interval: 7, keep_last: 2, keep_interval: 14}\noutput_dir: here\nseed: 5\n",
        infer=INFER + "dtype: bfloat16\n",
        train=TRAIN.replace("max_steps: 40", "max_steps: -1"),
    )
    assert [(env.id, env.name, env.weight) for env in cfg.env] == [("a", "a", 3.0), ("b", "c", 1.0)]
    assert cfg.env[0].args == {"x": 1}
    assert (cfg.advantage, cfg.rollout.min_tokens, cfg.dtype, cfg.output_dir) == (
        "length_weighted",
        3,
        "bfloat16",
        "here",
    )
    assert (cfg.ckpt.interval, cfg.ckpt.keep_last, cfg.ckpt.keep_interval, cfg.seed) == (
        7,
        2,
        14,
        5,
    )
    assert cfg.train.max_steps == 40


def test_an_error_names_the_file_that_set_the_number_of_steps(three: Any) -> None:
    train, orch = (
        TRAIN.replace("max_steps: 40", "max_steps: 0"),
        ORCH.replace("max_steps: 40\n", ""),
    )
    with pytest.raises(ConfigError, match=r"^train\.yaml:7: max_steps: must be >= 1, got 0"):
        three(train=train, orch=orch)


# file, its text before and after -> lines of the error
REFUSED: list[tuple[str, str, str, list[str]]] = [
    (
        "train",
        "gpus: 1",
        "gpus: 0",
        ["train.yaml:3: gpus: must be >= 1, got 0"],
    ),
    ("train", "gpus: 1", "gpsu: 1", ["train.yaml:3: gpsu: unknown key (did you mean gpus?)"]),
    (
        "train",
        "logging_steps: 1",
        "qlora_bnb: true",
        [
            "train.yaml:15: recipe: fp8-hybrid on a base of qlora_bnb: the learner multiplies with "
            "what the base holds; write recipe: bf16"
        ],
    ),
    (
        "train",
        "recipe: fp8-hybrid",
        "qlora_fp8: true\nqlora_fp4: true",
        ["train.yaml:16: qlora_fp4: beside qlora_fp8: the base has one format"],
    ),
    (
        "train",
        "recipe: fp8-hybrid\n\nlora: true",
        "qlora_fp8: true\n\nlora: false",
        ["train.yaml:15: qlora_fp8: is the base of an adapter; it needs lora: true"],
    ),
    (
        "train",
        "lora: true",
        "lora: false",
        ["orch.yaml:3: model.lora_adapter: disagrees with train.yaml:17: lora: false"],
    ),
    (
        "train",
        "logging_steps: 1",
        "gradient_accumulation_steps: 1",
        [
            "train.yaml:8: gradient_accumulation_steps: a batch is one optimizer step, of as many "
            "micro-batches as it packs into; train.minibatches=N makes it N steps; only 4 works"
        ],
    ),
    (
        "train",
        "logging_steps: 1",
        "noise_scheduler:\n  enabled: true\n  sigma_end: 0.0",
        [
            "train.yaml:10: noise_scheduler.sigma_end: an exponential never reaches or leaves 0; "
            "set both sigmas above 0, or "
            "another noise.schedule"
        ],
    ),
    (
        "train",
        "ratio_type: token",
        "ratio_type: tokens",
        [
            "train.yaml:23: loss.ratio_type: must be one of token, sequence, got 'tokens' (did you "
            "mean token?)"
        ],
    ),
    (
        "train",
        "kl_tau: 0.0",
        "teacher_tau: 0.1",
        [
            "train.yaml:24: loss.teacher_tau: needs train.teacher, the model whose log-probs it "
            "pulls to"
        ],
    ),
    ("train", "kl_tau: 0.0", "mode: truncate", ["train.yaml:24: loss.mode: unknown key"]),
    (
        "train",
        "geo_mask_low: 0.1",
        "geo_mask_low: 20.0",
        ["train.yaml:28: loss.geo_mask_low: geo_mask_low (20) is more than geo_mask_high (10)"],
    ),
    (
        "train",
        "max_steps: 40",
        "max_steps: 41",
        ["orch.yaml:13: max_steps: 40 disagrees with train.yaml:7: max_steps: 41"],
    ),
    (
        "train",
        "lora_rank: 16",
        "lora_rank: 64",
        [
            "orch.yaml:4: model.lora_rank: 16 disagrees with train.yaml:18: lora_rank: 64",
            "infer.yaml:3: max_lora_rank: 32 is less than train.yaml:18: lora_rank: 64",
        ],
    ),
    (
        "train",
        "sequence_len: 2048",
        "sequence_len: 1024",
        ["train.yaml:6: sequence_len: 1024 is less than orch.yaml:12: seq_len: 2048"],
    ),
    (
        "train",
        "learning_rate: 2e-4",
        "learning_rate: -1",
        ["train.yaml:10: learning_rate: must be > 0.0, got -1"],
    ),
    (
        "infer",
        "Qwen3-0.6B",
        "Qwen3-8B",
        ["infer.yaml:1: model: Qwen/Qwen3-8B disagrees with train.yaml:1: model: Qwen/Qwen3-0.6B"],
    ),
    (
        "infer",
        "enable_lora: true",
        "enable_lora: false",
        ["infer.yaml:2: enable_lora: false disagrees with train.yaml:17: lora: true"],
    ),
    (
        "infer",
        "max_lora_rank: 32",
        "tp: 2",
        ["infer.yaml:3: tp: needs vLLM: the override rollout.engine=vllm"],
    ),
    (
        "infer",
        "max_lora_rank: 32",
        "trust_remote_code: true",
        [
            "infer.yaml:3: trust_remote_code: code from a model repository is never run; only "
            "false works"
        ],
    ),
    (
        "infer",
        "max_lora_rank: 32",
        "max_model_len: 64",
        ["infer.yaml:3: max_model_len: 64 is less than orch.yaml:16: sampling.max_tokens: 128"],
    ),
    (
        "infer",
        "max_lora_rank: 32",
        "weight_broadcast_type: nccl",
        [
            "infer.yaml:3: weight_broadcast_type: nccl is for all weights; an adapter travels by files"
        ],
    ),
    (
        "orch",
        "batch_size: 128",
        "batch_size: 100",
        [
            "orch.yaml:10: batch_size: batch_size (100) is not a multiple of rollouts_per_example "
            "(16)"
        ],
    ),
    (
        "orch",
        "max_tokens: 128",
        "max_tokns: 128",
        ["orch.yaml:16: sampling.max_tokns: unknown key (did you mean max_tokens?)"],
    ),
    (
        "orch",
        "seq_len: 2048",
        "rollout_transport: {type: zmqq}",
        [
            "orch.yaml:12: rollout_transport.type: must be one of filesystem, zmq, got 'zmqq' (did "
            "you mean zmq?)"
        ],
    ),
    (
        "orch",
        "seq_len: 2048",
        "client: {base_url: ['gpu:8000/v1']}",
        ["orch.yaml:12: client.base_url[0]: must be an address such as http://127.0.0.1:8000"],
    ),
    (
        "orch",
        "seq_len: 2048",
        "client: {base_url: ['http://gpu:8000/v1', 'http://gpu:8000/v1']}",
        ["orch.yaml:12: client.base_url: the same address stands twice"],
    ),
    (
        "orch",
        "seq_len: 2048",
        "buffer: {easy_threshold: 0.2, hard_threshold: 0.5}",
        [
            "orch.yaml:12: buffer.hard_threshold: hard_threshold (0.5) must be below "
            "easy_threshold (0.2)"
        ],
    ),
    (
        "orch",
        "seq_len: 2048",
        "buffer: {hard_fraction: 0.5}",
        [
            "orch.yaml:12: buffer.hard_fraction: needs buffer.hard_threshold beside it: without one "
            "there is no hard pool"
        ],
    ),
    (
        "orch",
        "seq_len: 2048",
        "buffer: {env_ratios: [0]}",
        ["orch.yaml:12: buffer.env_ratios: they must sum to more than 0"],
    ),
    (
        "orch",
        "seq_len: 2048",
        "advantage: {type: custom}",
        ["orch.yaml:12: advantage.type: custom needs advantage.import_path"],
    ),
    (
        "orch",
        "seq_len: 2048",
        "advantage: {type: custom, import_path: my.module.f}",
        [
            "orch.yaml:12: advantage.import_path: must be path/to/file.py:function, a function of a "
            "file of this machine"
        ],
    ),
    (
        "orch",
        "seq_len: 2048",
        "max_off_policy_steps: 0",
        [
            "orch.yaml:12: max_off_policy_steps: max_off_policy_steps (0) is less than "
            "max_async_level (1): rollouts would be dropped that the level allows"
        ],
    ),
    (
        "orch",
        "seq_len: 2048",
        "report_to: {project: mine}",
        [
            "orch.yaml:12: report_to.project: a file of lowroll's own says `track: [wandb]`; "
            "metrics.jsonl has every number and rollouts/ every response, and `lowroll report` "
            "draws them; only Surogate works"
        ],
    ),
    (
        "orch",
        "seq_len: 2048",
        "buffer: {env_ratios: [1, 2]}",
        ["orch.yaml:12: buffer.env_ratios: 2 ratios for 1 environments"],
    ),
    (
        "orch",
        "  - id: reverse-text",
        "  - {id: reverse-text, address: 'tcp://x'}",
        [
            "orch.yaml:8: env[0].address: environments run in scoring workers of this machine; "
            "there are no servers; only null works"
        ],
    ),
]


@pytest.mark.parametrize(
    ("file", "before", "after", "expected"), REFUSED, ids=lambda value: repr(value)[:40]
)
def test_what_is_refused(
    three: Callable[..., RunConfig], file: str, before: str, after: str, expected: list[str]
) -> None:
    text = {"train": TRAIN, "infer": INFER, "orch": ORCH}[file]
    assert before in text
    with pytest.raises(ConfigError) as caught:
        three(**{file: text.replace(before, after)})
    assert str(caught.value).splitlines() == expected


def test_an_override_gives_the_rollouts_to_vllm(three: Callable[..., RunConfig]) -> None:
    ours = ["rollout.engine=vllm"]
    infer = INFER + "tp: 2\ngpu_memory_utilization: 0.8\n"
    vllm = three(infer=infer, overrides=ours).rollout.vllm
    assert (vllm.tensor_parallel_size, vllm.gpu_memory_utilization, vllm.url) == (2, 0.8, None)
    orch = ORCH + "client: {base_url: ['http://gpu:8000/v1']}\n"
    cfg = three(orch=orch, overrides=ours)
    assert cfg.rollout.vllm.url == "http://gpu:8000/v1"
    assert not any("base_url" in note for note in cfg.notes)
    with pytest.raises(ConfigError, match=r"infer.yaml:5: tp: is for a server that lowroll starts"):
        three(infer=INFER + "\ntp: 2\n", orch=orch, overrides=ours)
    assert any(
        "client.base_url" in note for note in three(orch=orch.replace("gpu", "localhost")).notes
    )


def test_overrides_use_our_names_and_silence_their_note(three: Callable[..., RunConfig]) -> None:
    cfg = three(overrides=["rollout.weights=int8", "correction=acr", "train.max_steps=3"])
    assert (cfg.rollout.weights, cfg.correction, cfg.train.max_steps) == ("int8", "acr", 3)
    assert not any("AIPO" in note or "dense" in note for note in cfg.notes)
    with pytest.raises(ConfigError, match=r"^override sampling: unknown key"):
        three(overrides=["sampling.max_tokens=3"])


LOSSES: list[
    tuple[str, list[float], float]
] = [  # lines of loss:, coefficients of the four tokens, -4 J: by hand
    ("", [0.40936538, 0.55258546, 0, 0], 0.9333068191),
    ("  kl_tau: 0.1\n", [0.42573999, 0.54153375, 0, 0], 0.9441149898),
    ("  ratio_type: sequence\n", [0.40936538 / 4, 0.40936538 / 4, 0, 0], 0.2046826883),
    ("  token_mask_high: 12.0\n", [0.40936538, 0.55258546, 0, 5.51158819], 1.4844656381),
    ("  sequence_mask_high: 5.0\n", [0, 0, 0, 0], 0),
    ("  adv_tau: 2.0\n", [0.81873075, 1.10517092, 0, 0], 2 * 0.9333068191),
]


@pytest.mark.parametrize(("lines", "coefficients", "loss"), LOSSES)
def test_the_files_give_the_documents_loss(
    three: Callable[..., RunConfig], lines: str, coefficients: list[float], loss: float
) -> None:
    """One sample of four tokens and a prompt: -(coeff lp)[keep].sum() / loss_scale, the coefficient
    detached."""
    import torch

    from lowroll.objectives.objective import select

    head, tail = TRAIN.split("loss:\n")
    kept = [
        line for line in tail.splitlines(keepends=True) if line.split(":")[0] != lines.split(":")[0]
    ]
    cfg = three(train=f"{head}loss:\n{''.join(kept)}{lines}")
    learner = torch.tensor([[-9, -1.2, -0.8, -3, -0.1]], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([[-9, -1.0, -0.9, -0.5, -2.5]], dtype=torch.float64)
    J, _ = select(cfg.algorithm, cfg.correction)(
        learner=learner,
        behavior=behavior,
        advantages=torch.full((1, 5), 0.5),
        mask=torch.tensor([[0, 1, 1, 1, 1]]),
        **cfg.objective_options,
    )
    J.backward()
    assert -4 * J.item() == pytest.approx(loss, abs=5e-9)
    assert learner.grad is not None
    assert (4 * learner.grad[0]).tolist() == pytest.approx([0, *coefficients], abs=5e-9)
