"""The keys of the Surogate GRPO document: its train, infer and orch files, names and defaults as
documented.

Each file is a strict model of its own, so that an unknown key is an error with its line here too.
`only(...)` marks a key of later work: it is accepted at its neutral values, and refused with "not
available yet" when it asks for more. A key that needs nothing from this program (a port of a server
that an in-process run does not open) is accepted as is.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, Strict, model_validator
from pydantic_core import PydanticCustomError

from lowroll.config.loss import SurogateLoss
from lowroll.config.schema import FilterConfig, TemperatureConfig
from lowroll.config.section import (
    Count,
    NotNegative,
    Positive,
    Rate,
    Schedule,
    Section,
    Text,
    as_list,
    only,
)

Strings = Annotated[tuple[Text, ...], Strict(False)]
Whole = Annotated[int, Field(ge=0)]


class NoiseScheduler(Section):
    """train.yaml `noise_scheduler`: QeRL's adaptive quantization noise."""

    enabled: bool = False
    sigma_start: NotNegative = 5e-2
    sigma_end: NotNegative = 5e-4
    num_stages: Count = 10


class TrainFile(Section):
    """train.yaml."""

    model: Text
    output_dir: Text = "output"
    gpus: Annotated[int, only(1)] = 1
    zero_level: Annotated[int, only(0, 1)] = 1
    sequence_len: Count = 1024
    per_device_train_batch_size: Count = 2
    gradient_accumulation_steps: Count = 4
    max_steps: Annotated[int, Field(ge=-1)] = -1  # -1: until the orchestrator stops
    logging_steps: Count = 1
    learning_rate: Rate = 2e-4
    lr_scheduler_type: Schedule = "constant"
    warmup_steps: Whole = 0
    max_grad_norm: Positive = 1.0
    weight_decay: NotNegative = 0.01
    optimizer: Literal["adamw_8bit", "adamw"] = "adamw_8bit"
    recipe: Annotated[
        Literal["bf16", "fp8-hybrid", "fp8_hybrid", "nvfp4"],
        only("bf16", "fp8-hybrid", "fp8_hybrid"),
    ] = "bf16"
    lora: bool = True
    lora_rank: Count = 16
    lora_alpha: Positive = 32.0
    lora_target_modules: Annotated[Strings, Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    qlora_fp8: Annotated[bool, only(False)] = False
    qlora_bnb: Annotated[bool, only(False)] = False
    qlora_fp4: Annotated[bool, only(False)] = False
    loss: SurogateLoss = SurogateLoss()
    noise_scheduler: NoiseScheduler = NoiseScheduler()
    transport_type: Annotated[Literal["filesystem", "zmq"], only("filesystem")] = "filesystem"
    max_async_level: Whole = 1


class InferFile(Section):
    """infer.yaml."""

    model: Text | None = None
    host: str | None = None
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    dtype: Annotated[Literal["auto", "bfloat16", "float16"], only("auto", "bfloat16")] = "auto"
    max_model_len: Count | None = None
    enforce_eager: bool = False
    trust_remote_code: Annotated[
        bool, only(False, why="code from a model repository is never run")
    ] = False
    tp: Count = 1
    dp: Annotated[int, only(1)] = 1
    enable_lora: bool = True
    max_lora_rank: Count | None = None
    max_loras: Count = 8
    max_cpu_loras: Count = 100
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    weight_broadcast_type: Annotated[Literal["filesystem", "nccl"], only("filesystem")] = (
        "filesystem"
    )
    reasoning_parser: Annotated[str | None, only(None)] = None
    enable_auto_tool_choice: Annotated[bool, only(False)] = False
    rope_scaling: Annotated[
        dict[str, JsonValue] | None, only(None, why="read from the model's config.json")
    ] = None


class OrchModel(Section):
    """orch.yaml `model`."""

    name: Text | None = None
    lora_adapter: str | None = None
    lora_rank: Count | None = None
    lora_alpha: Positive | None = None


class Sampling(Section):
    """orch.yaml `sampling`."""

    max_tokens: Count | None = None
    temperature: Positive = 1.0
    temp_scheduler: TemperatureConfig | None = None
    repetition_penalty: Positive = 1.0
    min_tokens: Whole = 0
    seed: Annotated[int | None, only(None, why="rollouts draw from the run's `seed`")] = None


class OrchEnv(Section):
    """orch.yaml `env[]` and `eval.env[]`."""

    id: Text
    name: Text | None = None
    args: dict[str, JsonValue] = {}
    address: Annotated[str | None, only(None)] = None


OrchEnvs = Annotated[
    tuple[OrchEnv, ...], Strict(False), BeforeValidator(as_list), Field(min_length=1)
]


class Elastic(Section):
    """orch.yaml `client.elastic`: a pool of servers found by DNS."""

    hostname: Annotated[str | None, only(None)] = None
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    sync_interval: Positive = 5.0


class Client(Section):
    """orch.yaml `client`: how a separate inference server is reached."""

    base_url: Annotated[Strings, Field(min_length=1, max_length=1)] = ("http://localhost:8000/v1",)
    timeout: Positive = 1200
    api_key_var: str = "VLLM_API_KEY"
    skip_model_check: bool = False
    elastic: Elastic = Elastic()


class Buffer(Section):
    """orch.yaml `buffer`: choosing problems by difficulty."""

    seed: Annotated[int | None, only(None, why="prompts are drawn from the run's `seed`")] = None
    online_difficulty_filtering: Annotated[bool, only(False)] = False
    easy_threshold: Annotated[float | None, only(None)] = None
    hard_threshold: Annotated[float | None, only(None)] = None
    easy_fraction: Annotated[float, only(0.0, 0)] = 0.0
    hard_fraction: Annotated[float, only(0.0, 0)] = 0.0
    hash_keys: Strings = ("task", "prompt")
    skip_verification: Annotated[
        bool, only(False, why="a reward that is not computed is never 0")
    ] = False
    env_ratios: Annotated[tuple[NotNegative, ...], Strict(False)] | None = None


class Advantage(Section):
    """orch.yaml `advantage`."""

    type: Annotated[Literal["default", "custom"], only("default")] = "default"
    length_weighted_mean: bool = False
    import_path: Annotated[str | None, only(None)] = None
    kwargs: Annotated[dict[str, JsonValue], only({})] = {}


class OrchCkpt(Section):
    """orch.yaml `ckpt`."""

    interval: Count | None = None
    resume_step: Annotated[int | None, only(None, why="resume with --resume")] = None
    wait_for_weights_timeout: Positive | None = None
    keep_last: Count | None = None
    keep_interval: Count | None = None
    skip_progress: Annotated[bool, only(False, why="a resumed run is the uninterrupted one")] = (
        False
    )
    skip_buffer: Annotated[bool, only(False, why="a resumed run is the uninterrupted one")] = False


class OrchEval(Section):
    """orch.yaml `eval`."""

    env: OrchEnvs
    num_examples: Annotated[int, Field(ge=-1)] = -1
    rollouts_per_example: Count = 1
    interval: Count = 100
    eval_base_model: bool = True
    skip_eval_on_resume: bool = True
    cancel_inflight_rollouts_on_eval: bool = False


class ReportTo(Section):
    """orch.yaml `report_to`."""

    project: str = "Surogate"
    name: str | None = None
    offline: bool = False
    samples: JsonValue = None
    distributions: JsonValue = None
    interval: Count = 10


class RolloutTransport(Section):
    """orch.yaml `rollout_transport`."""

    type: Annotated[Literal["filesystem", "zmq"], only("filesystem")] = "filesystem"
    host: str = "localhost"
    port: Annotated[int, Field(ge=1, le=65535)] = 5555
    hwm: Count = 10


class WeightBroadcast(Section):
    """orch.yaml `weight_broadcast`."""

    type: Annotated[Literal["filesystem", "nccl"], only("filesystem")] = "filesystem"
    host: str = "localhost"
    port: Annotated[int, Field(ge=1, le=65535)] = 29501
    timeout: Positive = 1200


class OrchFile(Section):
    """orch.yaml."""

    model: OrchModel = OrchModel()
    env: OrchEnvs
    batch_size: Count = 128
    rollouts_per_example: Count = 1
    seq_len: Count = 2048
    max_steps: Count | None = None
    max_async_level: Whole = 1
    max_off_policy_steps: Whole = 8
    oversampling_factor: Annotated[float, only(1.0, 1)] = 1.0
    output_dir: Text = "outputs/run_default"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    sampling: Sampling = Sampling()
    client: Client = Client()
    buffer: Buffer = Buffer()
    advantage: Advantage = Advantage()
    filters: Annotated[tuple[FilterConfig, ...], Strict(False)] = ()
    ckpt: OrchCkpt = OrchCkpt()
    eval: OrchEval | None = None
    report_to: ReportTo = ReportTo()
    rollout_transport: RolloutTransport = RolloutTransport()
    weight_broadcast: WeightBroadcast = WeightBroadcast()

    @model_validator(mode="after")
    def _check(self) -> OrchFile:
        ratios = self.buffer.env_ratios
        if ratios is not None and len(ratios) != len(self.env):
            problem = (
                (("buffer", "env_ratios"),),
                f"{len(ratios)} ratios for {len(self.env)} environments",
            )
            raise PydanticCustomError(
                "combination", "{text}", {"text": problem[1], "problems": [problem]}
            )
        return self
