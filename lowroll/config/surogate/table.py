"""The table of the Surogate document's keys: where each acts, and what differs here.

A key that `schema.py` refuses (`only`) has its reason there instead of a row.
`docs/configuration.md` is made from both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowroll.config.build import section_in
from lowroll.config.data import FilterConfig
from lowroll.config.loss import SurogateLoss
from lowroll.config.processes import ElasticConfig
from lowroll.config.rollout import TemperatureConfig
from lowroll.config.section import AllowOnly, Section
from lowroll.config.surogate.schema import (
    Buffer,
    NoiseScheduler,
    OrchCkpt,
    OrchClient,
    OrchEnv,
    OrchEval,
    RolloutTransport,
    WeightBroadcast,
)

SECTIONS = ("train", "infer", "orch")


@dataclass(frozen=True)
class KeyMapping:
    """The mapping of a document's key. to: keys of RunConfig; none: it is checked against another
    file. copied: unchanged, to the one key. differs: from the document, and why."""

    to: tuple[str, ...] = ()
    differs: str = ""
    copied: bool = False


def _copied(to: str, differs: str = "") -> KeyMapping:
    return KeyMapping((to,), differs, copied=True)


def _same(prefix: str, *names: str) -> dict[str, KeyMapping]:
    return {name: _copied(f"{prefix}{name}") for name in names}


def _section(
    theirs: str, ours: str, model: type[Section], copied: bool = True, **differs: str
) -> dict[str, KeyMapping]:
    """Return a row for each key of a section whose names are the same here."""
    return {
        f"{theirs}.{name}": KeyMapping((f"{ours}.{name}",), differs.get(name, ""), copied)
        for name, field in model.model_fields.items()
        if section_in(field.annotation) is None
        and not any(isinstance(one, AllowOnly) for one in field.metadata)
    }


LOCAL = "`localhost` is this machine alone; see docs/roles.md for two"
VLLM = "of vLLM alone; lowroll's own engine refuses it"
BASE = (
    "the rollouts draw from the very base that the adapter learns on; `lowroll serve infer.yaml` "
    "needs the same as an override: rollout.weights"
)

TRAIN: Mapping[str, KeyMapping] = {
    "model": _copied("model"),
    "output_dir": KeyMapping(
        ("output_dir",),
        "the folder of the run is `orch.output_dir`, which must lie in it or be it; a trainer with "
        "train.yaml alone looks for the one `run_*` folder in it",
    ),
    "sequence_len": KeyMapping(
        ("train.tokens_per_microbatch",),
        "not written: `orch.seq_len`. A row of so many tokens, times per_device_train_batch_size, is "
        "packed without padding",
    ),
    "per_device_train_batch_size": KeyMapping(("train.tokens_per_microbatch",), "as sequence_len"),
    "max_steps": KeyMapping(
        ("train.max_steps",), "a run has an end: 100 steps when neither file says, with a warning"
    ),
    "logging_steps": _copied("logging_steps", "of the terminal; metrics.jsonl has every step"),
    **_same(
        "train.",
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "max_grad_norm",
        "weight_decay",
        "lora",
        "lora_rank",
        "lora_alpha",
        "lora_target_modules",
    ),
    "gpus": _copied("train.gpus", "two or more need processes: the override launcher=local"),
    "optimizer": KeyMapping(
        ("train.optimizer",), "8-bit moments only where it is written: they need the extra `bnb`"
    ),
    "recipe": KeyMapping(
        ("train.forward",),
        "forward products in this format, backward ones in the run's dtype; with a QLoRA base of "
        "the same format it is train.forward: aligned",
    ),
    **{
        name: KeyMapping(("rollout.weights",), BASE)
        for name in ("qlora_fp8", "qlora_bnb", "qlora_fp4")
    },
    **_section(
        "loss",
        "loss.aipo",
        SurogateLoss,
        teacher_tau="the files have no key for the teacher: the override train.teacher",
    ),
    **_section("noise_scheduler", "noise", NoiseScheduler, copied=False),
    "noise_scheduler.enabled": KeyMapping(("noise",), "the final norm takes no noise here"),
    "transport_type": KeyMapping(
        ("rollout_transport.type",), "must be that of orch.yaml where both are written"
    ),
    "max_async_level": KeyMapping(
        ("asynchrony.max_async_level",),
        "must be that of orch.yaml where both are written; one process has level 0, which every "
        "value allows",
    ),
}
INFER: Mapping[str, KeyMapping] = {
    "model": KeyMapping(
        ("model",), "must be that of train.yaml; `lowroll serve infer.yaml` needs it"
    ),
    "host": KeyMapping(
        ("serve.host",),
        "null is this machine alone (127.0.0.1), and not every address: one that others reach takes "
        "a token",
    ),
    "port": KeyMapping(("serve.port",), "a launcher takes free ports, unless this is written"),
    "dtype": KeyMapping(
        ("dtype", "rollout.vllm.dtype"), "float16 is vLLM's alone; bfloat16 is the learner's, too"
    ),
    "max_model_len": KeyMapping(("rollout.max_model_len",), "the lesser of it and orch.seq_len"),
    "enforce_eager": KeyMapping(("rollout.cuda_graphs", "rollout.vllm.serve_args")),
    "tp": KeyMapping(("rollout.vllm.tensor_parallel_size",), VLLM),
    "enable_lora": KeyMapping(("train.lora",), "must be true where train.yaml learns an adapter"),
    "max_lora_rank": KeyMapping(
        ("rollout.vllm.max_lora_rank",),
        "at least train.lora_rank; an engine by hand takes adapters up to it",
    ),
    "enable_prefix_caching": KeyMapping(
        ("rollout.prefix_caching", "rollout.vllm.serve_args"), "null: it is on"
    ),
    "gpu_memory_utilization": KeyMapping(
        ("rollout.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
        "not written: what the run can use, as in co-locate mode",
    ),
    "weight_broadcast_type": KeyMapping(
        ("weight_broadcast.type",), "must be that of orch.yaml where both are written"
    ),
}
ORCH: Mapping[str, KeyMapping] = {
    "model.name": KeyMapping(
        ("model",), "must be that of train.yaml; `lowroll orchestrate orch.yaml` needs it"
    ),
    "model.lora_rank": KeyMapping(("train.lora_rank",), "must be that of train.yaml"),
    "model.lora_alpha": KeyMapping(("train.lora_alpha",), "must be that of train.yaml"),
    "batch_size": _copied("batch_size"),
    "rollouts_per_example": _copied(
        "rollouts_per_example", "the default is refused: one response has no group"
    ),
    "seq_len": KeyMapping(
        ("rollout.max_model_len", "train.tokens_per_microbatch"),
        "prompts that leave no room for a whole response are passed over, not cut",
    ),
    "max_steps": KeyMapping(("train.max_steps",), "as train.yaml's"),
    "max_async_level": KeyMapping(("asynchrony.max_async_level",), "as train.yaml's"),
    **_same("asynchrony.", "max_off_policy_steps", "oversampling_factor"),
    "output_dir": KeyMapping(("output_dir",)),
    "seed": _copied("seed"),
    "sampling.max_tokens": KeyMapping(
        ("rollout.max_tokens",), "null: half of the longest sequence"
    ),
    **{
        f"sampling.{name}": _copied(f"rollout.{name}")
        for name in ("temperature", "temp_scheduler", "repetition_penalty", "min_tokens")
    },
    **_section(
        "sampling.temp_scheduler", "rollout.temp_scheduler", TemperatureConfig, copied=False
    ),
    "sampling.seed": _copied("rollout.seed", "null: the run's seed"),
    **_section(
        "env[]",
        "env[]",
        OrchEnv,
        copied=False,
        id="an environment of lowroll's, or path/to/file.py",
    ),
    **_section("client", "client", OrchClient, skip_model_check="with a warning"),
    "client.base_url": KeyMapping(
        ("client.base_url", "rollout.vllm.url"),
        "the default is the run's own engine, but for `lowroll orchestrate`",
    ),
    **_section("client.elastic", "client.elastic", ElasticConfig),
    **_section(
        "buffer",
        "buffer",
        Buffer,
        seed="null: the run's seed",
        skip_verification="allowed, with a warning: every reward is 0",
    ),
    "buffer.env_ratios": KeyMapping(
        ("env[].weight",), "an environment of ratio 0 is left out of the training ones"
    ),
    "advantage.type": KeyMapping(("advantage", "advantage_function")),
    "advantage.length_weighted_mean": KeyMapping(("advantage",)),
    "advantage.import_path": KeyMapping(
        ("advantage_function.import_path",),
        "path/to/file.py:function of this machine, and no module's name: nothing is imported that "
        "the file does not name; f(rewards, lengths, **kwargs) of one group",
    ),
    "advantage.kwargs": KeyMapping(("advantage_function.kwargs",)),
    **_section("filters[]", "filters[]", FilterConfig, copied=False),
    **_section(
        "ckpt",
        "ckpt",
        OrchCkpt,
        resume_step="-1 begins where there is no run yet; a step of its own is for one process: "
        "roles go on from where they were",
        wait_for_weights_timeout="of every wait for weights; null: weight_broadcast.timeout",
        skip_progress="with a warning: prompts come twice; in one process",
        skip_buffer="in one process",
    ),
    "ckpt.interval": KeyMapping(("ckpt.interval",), "null is 50, and not never"),
    "ckpt.keep_last": KeyMapping(("ckpt.keep_last",)),
    "ckpt.keep_interval": KeyMapping(("ckpt.keep_interval",)),
    **_section("eval.env[]", "eval.env[]", OrchEnv, copied=False),
    **_section(
        "eval",
        "eval",
        OrchEval,
        copied=False,
        num_examples="-1 is all of a split that ends, and 64 of one that does not",
    ),
    **_section(
        "rollout_transport",
        "rollout_transport",
        RolloutTransport,
        host=LOCAL,
        hwm="of the filesystem, too",
    ),
    "rollout_transport.type": KeyMapping(("rollout_transport.type",)),
    **_section(
        "weight_broadcast",
        "weight_broadcast",
        WeightBroadcast,
        host=LOCAL,
        timeout="of the filesystem, too",
    ),
    "weight_broadcast.type": KeyMapping(
        ("weight_broadcast.type",), "cuda_ipc is lowroll's own: an override"
    ),
}
TABLES: Mapping[str, Mapping[str, KeyMapping]] = {"train": TRAIN, "infer": INFER, "orch": ORCH}

# keys repeated in several files
REPEATED: tuple[tuple[tuple[str, str], ...], ...] = (
    (("train", "model"), ("infer", "model"), ("orch", "model.name")),
    (("train", "max_steps"), ("orch", "max_steps")),
    (("train", "lora_rank"), ("orch", "model.lora_rank")),
    (("train", "lora_alpha"), ("orch", "model.lora_alpha")),
    (("train", "max_async_level"), ("orch", "max_async_level")),
    (("train", "transport_type"), ("orch", "rollout_transport.type")),
    (("infer", "weight_broadcast_type"), ("orch", "weight_broadcast.type")),
)
# without effect in one process
ROLES_ALONE: Mapping[str, tuple[str, ...]] = {
    "train": ("transport_type", "max_async_level"),
    "infer": ("host", "port", "weight_broadcast_type"),
    "orch": (
        "max_async_level",
        "client.base_url",
        "client.timeout",
        "client.api_key_var",
        "client.skip_model_check",
        "client.elastic",
        "rollout_transport",
        "weight_broadcast",
        "ckpt.wait_for_weights_timeout",
    ),
}
