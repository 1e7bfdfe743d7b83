"""Every key of the Surogate document: another value changes the run's settings, where the table of
the documents says so, or it is refused by name with its reason. None is accepted and ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import keys as documented
from lowroll.config import ConfigError, RunConfig
from lowroll.config.surogate.read import MODELS, load_surogate
from lowroll.config.surogate.roles import load_role
from lowroll.config.surogate.table import ROLES_ALONE, TABLES

LEAST: dict[str, dict[str, Any]] = {
    "train": {"model": "m"},
    "infer": {},
    "orch": {"env": [{"id": "reverse-text"}], "rollouts_per_example": 8},
}
VLLM = ("rollout.engine=vllm",)
ROLES = {"serve": "infer", "orchestrate": "orch"}


@dataclass
class Change:
    """Two values of a key, and what they need beside them: keys of the files (`then`: the second
    one's), overrides, or a role that reads its own file alone."""

    before: Any
    after: Any
    beside: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    role: str = ""
    then: dict[str, Any] = field(default_factory=dict)


def lora(after: bool) -> dict[str, Any]:
    return {"train.lora": after}


CODE = "f.py:advantage"
CUSTOM = {"orch.advantage.type": "custom", "orch.advantage.import_path": CODE}
GIBBERISH, LOOP = (
    {"orch.filters": [{"type": "gibberish"}]},
    {"orch.filters": [{"type": "repetition"}]},
)
EVAL = {"orch.eval": {"env": [{"id": "reverse-text"}]}}
NOISE = {"train.noise_scheduler.enabled": True}
SCHEDULE = {"type": "linear", "start_temperature": 1.0, "end_temperature": 0.6}
CHANGES: dict[str, Change] = {
    "train.model": Change("m", "n"),
    "train.output_dir": Change("output", "there"),
    "train.gpus": Change(1, 2),
    "train.sequence_len": Change(2048, 4096),
    "train.per_device_train_batch_size": Change(2, 1),
    "train.max_steps": Change(40, 41),
    "train.logging_steps": Change(1, 5),
    "train.learning_rate": Change(2e-4, 1e-5),
    "train.lr_scheduler_type": Change("constant", "cosine"),
    "train.warmup_steps": Change(0, 3),
    "train.max_grad_norm": Change(1.0, 0.5),
    "train.weight_decay": Change(0.01, 0.0),
    "train.optimizer": Change("adamw_8bit", "adamw"),
    "train.recipe": Change("bf16", "fp8-hybrid"),
    "train.lora": Change(True, False),
    "train.lora_rank": Change(16, 8),
    "train.lora_alpha": Change(32, 16),
    "train.lora_target_modules": Change(["q_proj", "v_proj"], ["q_proj"]),
    "train.qlora_fp8": Change(False, True),
    "train.qlora_bnb": Change(False, True),
    "train.qlora_fp4": Change(False, True),
    "train.loss.ratio_type": Change("token", "sequence"),
    "train.loss.kl_tau": Change(0.0, 0.1),
    "train.loss.adv_tau": Change(1.0, 2.0),
    "train.loss.teacher_tau": Change(0.0, 0.1, overrides=("train.teacher=t",)),
    "train.loss.token_mask_low": Change(0.125, 0.2),
    "train.loss.token_mask_high": Change(8.0, 6.0),
    "train.loss.geo_mask_low": Change(0.1, 0.2),
    "train.loss.geo_mask_high": Change(10.0, 6.0),
    "train.loss.sequence_mask_low": Change(0.0, 0.1),
    "train.loss.sequence_mask_high": Change(100.0, 50.0),
    "train.loss.sequence_clip_high": Change(10.0, 5.0),
    "train.noise_scheduler.enabled": Change(False, True),
    "train.noise_scheduler.sigma_start": Change(5e-2, 1e-2, NOISE),
    "train.noise_scheduler.sigma_end": Change(5e-4, 1e-4, NOISE),
    "train.noise_scheduler.num_stages": Change(10, 4, NOISE),
    "train.transport_type": Change("filesystem", "zmq"),
    "train.max_async_level": Change(1, 2),
    "infer.model": Change("m", "n", role="serve"),
    "infer.host": Change(None, "10.0.0.1"),
    "infer.port": Change(8000, 8001),
    "infer.dtype": Change("auto", "bfloat16"),
    "infer.max_model_len": Change(None, 1024),
    "infer.enforce_eager": Change(False, True),
    "infer.tp": Change(1, 2, overrides=VLLM),
    "infer.enable_lora": Change(True, False, role="serve"),
    "infer.max_lora_rank": Change(32, 64, overrides=VLLM),
    "infer.enable_prefix_caching": Change(None, False),
    "infer.gpu_memory_utilization": Change(0.9, 0.5),
    "infer.weight_broadcast_type": Change("filesystem", "nccl", lora(False)),
    "orch.model.name": Change("m", "n", role="orchestrate"),
    "orch.model.lora_rank": Change(16, 8, {"orch.model.name": "m"}, role="orchestrate"),
    "orch.model.lora_alpha": Change(32, 16, {"orch.model.name": "m"}, role="orchestrate"),
    "orch.batch_size": Change(128, 64),
    "orch.rollouts_per_example": Change(8, 16),
    "orch.seq_len": Change(2048, 1024),
    "orch.max_steps": Change(None, 40),
    "orch.max_async_level": Change(1, 2),
    "orch.max_off_policy_steps": Change(8, 4),
    "orch.oversampling_factor": Change(1.0, 1.5),
    "orch.output_dir": Change("outputs/run_default", "outputs/run_b"),
    "orch.seed": Change(42, 43),
    "orch.sampling.max_tokens": Change(None, 100),
    "orch.sampling.temperature": Change(1.0, 0.8),
    "orch.sampling.temp_scheduler": Change(None, SCHEDULE),
    "orch.sampling.temp_scheduler.type": Change(
        "linear", "cosine", {"orch.sampling.temp_scheduler": SCHEDULE}
    ),
    "orch.sampling.temp_scheduler.start_temperature": Change(
        1.0, 1.2, {"orch.sampling.temp_scheduler": SCHEDULE}
    ),
    "orch.sampling.temp_scheduler.end_temperature": Change(
        0.6, 0.7, {"orch.sampling.temp_scheduler": SCHEDULE}
    ),
    "orch.sampling.repetition_penalty": Change(1.0, 1.1),
    "orch.sampling.min_tokens": Change(0, 4),
    "orch.sampling.seed": Change(None, 3),
    "orch.env[].id": Change("reverse-text", "arithmetic"),
    "orch.env[].name": Change(None, "mine"),
    "orch.env[].args": Change({}, {"max_words": 2}),
    "orch.client.base_url": Change(
        ["http://localhost:8000/v1"], ["http://a:1/v1", "http://b:1/v1"]
    ),
    "orch.client.timeout": Change(1200, 60),
    "orch.client.api_key_var": Change("VLLM_API_KEY", "OTHER"),
    "orch.client.skip_model_check": Change(False, True),
    "orch.client.elastic.hostname": Change(None, "engines.local"),
    "orch.client.elastic.port": Change(8000, 9000),
    "orch.client.elastic.sync_interval": Change(5.0, 1.0),
    "orch.buffer.seed": Change(None, 3),
    "orch.buffer.online_difficulty_filtering": Change(False, True),
    "orch.buffer.easy_threshold": Change(None, 0.9),
    "orch.buffer.hard_threshold": Change(None, 0.1),
    "orch.buffer.easy_fraction": Change(0.0, 0.5, {"orch.buffer.easy_threshold": 0.9}),
    "orch.buffer.hard_fraction": Change(0.0, 0.5, {"orch.buffer.hard_threshold": 0.1}),
    "orch.buffer.hash_keys": Change(["task", "prompt"], ["prompt"]),
    "orch.buffer.skip_verification": Change(False, True),
    "orch.buffer.env_ratios": Change(None, [3]),
    "orch.advantage.type": Change("default", "custom", then={"orch.advantage.import_path": CODE}),
    "orch.advantage.length_weighted_mean": Change(False, True),
    "orch.advantage.import_path": Change(CODE, "g.py:advantage", CUSTOM),
    "orch.advantage.kwargs": Change({}, {"scale": 2}, CUSTOM),
    "orch.filters[].type": Change("gibberish", "repetition", GIBBERISH),
    "orch.filters[].enforce": Change(False, True, GIBBERISH),
    "orch.filters[].token_id_threshold": Change(100000, 5, GIBBERISH),
    "orch.filters[].logprob_offset": Change(2.0, 1.0, GIBBERISH),
    "orch.filters[].window": Change(3000, 10, LOOP),
    "orch.filters[].prob_threshold": Change(0.99, 0.9, LOOP),
    "orch.ckpt.interval": Change(None, 5),
    "orch.ckpt.resume_step": Change(None, -1),
    "orch.ckpt.wait_for_weights_timeout": Change(None, 60),
    "orch.ckpt.keep_last": Change(None, 2),
    "orch.ckpt.keep_interval": Change(None, 10),
    "orch.ckpt.skip_progress": Change(False, True),
    "orch.ckpt.skip_buffer": Change(False, True),
    "orch.eval.env[].id": Change("reverse-text", "arithmetic", EVAL),
    "orch.eval.env[].name": Change(None, "mine", EVAL),
    "orch.eval.env[].args": Change({}, {"max_words": 2}, EVAL),
    "orch.eval.num_examples": Change(-1, 10, EVAL),
    "orch.eval.rollouts_per_example": Change(1, 4, EVAL),
    "orch.eval.interval": Change(100, 10, EVAL),
    "orch.eval.eval_base_model": Change(True, False, EVAL),
    "orch.eval.skip_eval_on_resume": Change(True, False, EVAL),
    "orch.eval.cancel_inflight_rollouts_on_eval": Change(False, True, EVAL),
    "orch.rollout_transport.type": Change("filesystem", "zmq"),
    "orch.rollout_transport.host": Change("localhost", "10.0.0.1"),
    "orch.rollout_transport.port": Change(5555, 5556),
    "orch.rollout_transport.hwm": Change(10, 2),
    "orch.weight_broadcast.type": Change("filesystem", "nccl", lora(False)),
    "orch.weight_broadcast.host": Change("localhost", "10.0.0.1"),
    "orch.weight_broadcast.port": Change(29501, 29502),
    "orch.weight_broadcast.timeout": Change(1200, 60),
}
# of vLLM, the other target of the row
OF_VLLM: dict[str, Change] = {
    "infer.dtype": Change("auto", "float16", overrides=VLLM),
    "infer.enforce_eager": Change(False, True, overrides=VLLM),
    "infer.enable_prefix_caching": Change(None, False, overrides=VLLM),
    "infer.gpu_memory_utilization": Change(0.9, 0.5, overrides=VLLM),
    "orch.client.base_url": Change(["http://localhost:8000/v1"], ["http://a:1/v1"], overrides=VLLM),
}
# what is refused, at a value that asks for it
REFUSED: dict[str, Any] = {
    "train.zero_level": 2,
    "train.gradient_accumulation_steps": 1,
    "infer.trust_remote_code": True,
    "infer.dp": 2,
    "infer.max_loras": 1,
    "infer.max_cpu_loras": 1,
    "infer.reasoning_parser": "qwen3",
    "infer.enable_auto_tool_choice": True,
    "infer.rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "orch.model.lora_adapter": "mine",
    "orch.env[].address": "tcp://10.0.0.1:5000",
    "orch.eval.env[].address": "tcp://10.0.0.1:5000",
    "orch.report_to.project": "mine",
    "orch.report_to.name": "mine",
    "orch.report_to.offline": True,
    "orch.report_to.samples": True,
    "orch.report_to.distributions": True,
    "orch.report_to.interval": 1,
}


def leaves() -> Iterator[documented.Key]:
    """Every key of the three files that is no section, as `train.model`."""
    for file, model in MODELS.items():
        found = list(documented.keys(model))
        for key in found:
            inner, _ = documented.section(key.field.annotation)
            if inner is None or key.name in TABLES[file]:
                yield key._replace(name=f"{file}.{key.name}")


def put(files: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.replace("[]", ".0").split(".")
    node: Any = files
    for part in path:
        if isinstance(node, list):
            node = node[int(part)]
        else:
            node = node.setdefault(part, {})
    node[last] = value


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    monkeypatch.chdir(tmp_path)
    for name in ("f", "g"):
        (tmp_path / f"{name}.py").write_text("def advantage(rewards, lengths): return rewards\n")

    def of(key: str, value: Any, change: Change) -> RunConfig:
        files = yaml.safe_load(yaml.safe_dump(LEAST))
        if change.role:
            files["infer"] = {"model": "m", "port": 8000}
        needed = change.beside | (change.then if value == change.after else {})
        for other, beside in needed.items():
            put(files, other, yaml.safe_load(yaml.safe_dump(beside)))
        put(files, key, value)
        for name, tree in files.items():
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        if change.role == "serve":
            return load_role("serve", "infer.yaml", change.overrides)
        if change.role == "orchestrate":
            return load_role("orchestrate", "orch.yaml", change.overrides)
        return load_surogate("train.yaml", "infer.yaml", "orch.yaml", change.overrides)

    return of


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else key)
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        for value in tree:
            yield from flat(value, f"{prefix}[]")
    else:
        yield prefix, tree


def changed(one: RunConfig, other: RunConfig) -> set[str]:
    before, after = (dict(flat(yaml.safe_load(cfg.dump()))) for cfg in (one, other))
    keys = before.keys() | after.keys()
    return {key for key in keys if before.get(key, "") != after.get(key, "")}


def test_every_key_is_here_and_has_one_row() -> None:
    every = {key.name for key in leaves()}
    refused = {key.name for key in leaves() if documented.only(key.field) is not None}
    rows = {f"{file}.{name}" for file, table in TABLES.items() for name in table}
    assert rows | refused == every and not rows & refused
    assert CHANGES.keys() == rows and REFUSED.keys() == refused
    alone = {f"{file}.{key}" for file, keys in ROLES_ALONE.items() for key in keys}
    assert not [key for key in alone if not any(k.startswith(key) for k in every)]
    for key in leaves():
        assert key.meaning, key.name


@pytest.mark.parametrize("key", CHANGES)
def test_another_value_acts_where_the_table_says(
    key: str, loaded: Callable[..., RunConfig]
) -> None:
    change = CHANGES[key]
    before, after = (loaded(key, value, change) for value in (change.before, change.after))
    file, _, name = key.partition(".")
    row, found = TABLES[file][name], changed(before, after)
    assert any(k == to or k.startswith((f"{to}.", f"{to}[]")) for k in found for to in row.to), (
        found
    )
    if row.copied:
        values = dict(flat(yaml.safe_load(after.dump())))
        to = row.to[0]
        if not isinstance(change.after, dict):
            assert values[to] == change.after


@pytest.mark.parametrize("key", OF_VLLM)
def test_of_vllm(key: str, loaded: Callable[..., RunConfig]) -> None:
    change = OF_VLLM[key]
    before, after = (loaded(key, value, change) for value in (change.before, change.after))
    assert any(k.startswith("rollout.vllm.") for k in changed(before, after))


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_refused_is_refused_by_name(key: str, loaded: Callable[..., RunConfig]) -> None:
    beside = EVAL if ".eval." in key else {}
    with pytest.raises(ConfigError) as error:
        loaded(key, REFUSED[key], Change(None, None, beside))
    (line,) = str(error.value).splitlines()
    file, _, name = key.partition(".")
    found = next(k for k in leaves() if k.name == key)
    named = name.replace("[]", "[0]")
    assert (
        line.startswith(f"{file}.yaml:")
        and f": {named}: {documented.only(found.field).why};" in line
    )
    neutral = documented.only(found.field).neutral[0]
    assert loaded(key, neutral, Change(None, None, beside))


def test_the_copied_rows_lead_to_keys_that_there_are() -> None:
    known = {key.name for key in documented.keys(RunConfig)}
    sections = {name.rpartition(".")[0] for name in known}
    for file, table in TABLES.items():
        for name, row in table.items():
            assert row.to, f"{file}.{name}"
            assert {*row.to} <= known | sections, f"{file}.{name}: {row.to}"
