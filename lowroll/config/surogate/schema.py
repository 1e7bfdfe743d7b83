"""The keys of the Surogate GRPO document: its train, infer and orch files, with their defaults.

`only(...)` marks an unsupported key: its neutral values are accepted, others are refused with the
reason. `table.py` maps the other keys.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, Strict, model_validator
from pydantic_core import PydanticCustomError

from lowroll.config.data import BufferConfig, FilterConfig
from lowroll.config.document import Path
from lowroll.config.loss import SurogateLoss
from lowroll.config.processes import (
    ElasticConfig,
    Port,
    RolloutTransportConfig,
    WeightBroadcastConfig,
)
from lowroll.config.rollout import TemperatureConfig
from lowroll.config.section import (
    Count,
    NotNegative,
    Positive,
    Rate,
    Schedule,
    Section,
    Seed,
    Text,
    Whole,
    as_list,
    only,
)
from lowroll.config.train import LORA_TARGETS

Strings = Annotated[tuple[Text, ...], Strict(False)]
NO_TRACKER = (
    "a file of lowroll's own says `track: [wandb]`; metrics.jsonl has every number and rollouts/ "
    "every response, and `lowroll report` draws them"
)
ONE_ADAPTER = "an engine holds one adapter, the run's own"
ONE_ANSWER = "an environment asks once, reads the whole response, and has no tools"


class NoiseScheduler(Section):
    """train.yaml `noise_scheduler`: QeRL's adaptive quantization noise."""

    enabled: bool = False
    sigma_start: NotNegative = 5e-2
    sigma_end: NotNegative = 5e-4
    num_stages: Count = 10  # the first has no noise


class TrainFile(Section):
    """train.yaml."""

    model: Text
    output_dir: Text = "output"  # with the orchestrator's run_* folders
    gpus: Count = 1
    # what several GPUs share: optimizer states (1), ...
    zero_level: Annotated[
        int, only(1, why="what several GPUs share is all or nothing: the override train.sharding")
    ] = 1
    sequence_len: Count = 1024
    per_device_train_batch_size: Count = 2  # packed sequences
    # micro-batches of an optimizer step
    gradient_accumulation_steps: Annotated[
        int,
        only(
            4,
            why="a batch is one optimizer step, of as many micro-batches as it packs into; "
            "train.minibatches=N makes it N steps",
        ),
    ] = 4
    max_steps: Annotated[int, Field(ge=-1)] = -1  # -1: until the orchestrator stops
    logging_steps: Count = 1
    learning_rate: Rate = 2e-4
    lr_scheduler_type: Schedule = "constant"
    warmup_steps: Whole = 0
    max_grad_norm: Positive = 1.0
    weight_decay: NotNegative = 0.01
    optimizer: Literal["adamw_8bit", "adamw"] = "adamw_8bit"  # moments in 8 bits, or not
    # precision of matrix products
    recipe: Literal["bf16", "fp8-hybrid", "fp8_hybrid", "nvfp4"] = "bf16"
    lora: bool = True
    lora_rank: Count = 16
    lora_alpha: Positive = 32.0  # scale times rank
    lora_target_modules: Annotated[Strings, Field(min_length=1)] = LORA_TARGETS
    qlora_fp8: bool = False
    qlora_bnb: bool = False
    qlora_fp4: bool = False  # base in NVFP4
    loss: SurogateLoss = SurogateLoss()
    noise_scheduler: NoiseScheduler = NoiseScheduler()
    transport_type: Literal["filesystem", "zmq"] = "filesystem"
    max_async_level: Whole = 1

    @model_validator(mode="after")
    def _check(self) -> TrainFile:
        """Return the file. A validation error for bases in conflict with each other or with the
        recipe."""
        bases = [name for name in BASES if getattr(self, name)]
        if not bases:
            return self
        base = bases[0]
        if len(bases) > 1:
            keys: tuple[Path, ...] = ((bases[1],),)
            text = f"beside {base}: the base has one format"
        elif not self.lora:
            keys = ((base,), ("lora",))
            text = "is the base of an adapter; it needs lora: true"
        elif RECIPES.get(self.recipe) not in (None, BASES[base]):
            keys = (("recipe",), (base,))
            text = (
                f"{self.recipe} on a base of {base}: the learner multiplies with what the base "
                "holds; write recipe: bf16"
            )
        else:
            return self
        raise PydanticCustomError(
            "combination", "{text}", {"text": text, "problems": [(keys, text)]}
        )


# formats of the rollouts and base, and of the learner's forward
BASES = {"qlora_fp8": "fp8", "qlora_bnb": "nf4", "qlora_fp4": "nvfp4"}
RECIPES = {"fp8-hybrid": "fp8", "fp8_hybrid": "fp8", "nvfp4": "nvfp4"}


class InferFile(Section):
    """infer.yaml."""

    model: Text | None = None
    host: Text | None = None
    port: Port = 8000
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"  # of computation
    max_model_len: Count | None = None  # tokens
    enforce_eager: bool = False
    trust_remote_code: Annotated[
        bool, only(False, why="code from a model repository is never run")
    ] = False
    tp: Count = 1  # GPUs that share the model
    # engines behind one address
    dp: Annotated[
        int,
        only(
            1,
            why="an address is one engine; the override rollout.engines starts several, and "
            "client.base_url lists those that others start",
        ),
    ] = 1
    enable_lora: bool = True  # accept adapters
    max_lora_rank: Count | None = None
    max_loras: Annotated[int, only(8, why=ONE_ADAPTER)] = 8
    max_cpu_loras: Annotated[int, only(100, why=ONE_ADAPTER)] = 100
    enable_prefix_caching: bool | None = None
    # share of GPU memory
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    weight_broadcast_type: Literal["filesystem", "nccl"] = "filesystem"
    reasoning_parser: Annotated[str | None, only(None, why=ONE_ANSWER)] = None  # of thoughts
    enable_auto_tool_choice: Annotated[bool, only(False, why=ONE_ANSWER)] = False
    rope_scaling: Annotated[
        dict[str, JsonValue] | None,
        only(
            None,
            why="engine and trainer must agree on it, so it is read from the model's config.json: "
            "write it there",
        ),
    ] = None


class OrchModel(Section):
    """orch.yaml `model`."""

    name: Text | None = None
    # the adapter's name in the engine
    lora_adapter: Annotated[
        str | None, only("default", None, why="the run's adapter has no other name")
    ] = None
    lora_rank: Count | None = None
    lora_alpha: Positive | None = None


class OrchSampling(Section):
    """orch.yaml `sampling`."""

    max_tokens: Count | None = None
    temperature: Positive = 1.0  # or temp_scheduler
    temp_scheduler: TemperatureConfig | None = None
    repetition_penalty: Positive = 1.0
    min_tokens: Whole = 0
    seed: Seed | None = None


class OrchEnv(Section):
    """orch.yaml `env[]` and `eval.env[]`."""

    id: Text
    name: Text | None = None
    args: dict[str, JsonValue] = {}
    # of an environment server
    address: Annotated[
        str | None,
        only(None, why="environments run in scoring workers of this machine; there are no servers"),
    ] = None


OrchEnvs = Annotated[
    tuple[OrchEnv, ...], Strict(False), BeforeValidator(as_list), Field(min_length=1)
]


class OrchClient(Section):
    """orch.yaml `client`: how inference servers are reached."""

    base_url: Annotated[Strings, Field(min_length=1)] = ("http://localhost:8000/v1",)
    timeout: Positive = 1200  # seconds
    api_key_var: Text = "VLLM_API_KEY"
    skip_model_check: bool = False
    elastic: ElasticConfig = ElasticConfig()


class Buffer(BufferConfig):
    """orch.yaml `buffer`: pools by difficulty."""

    hash_keys: Strings = ("task", "prompt")
    # sampling shares of the environments
    env_ratios: Annotated[tuple[NotNegative, ...], Strict(False)] | None = None


class Advantage(Section):
    """orch.yaml `advantage`."""

    type: Literal["default", "custom"] = "default"
    length_weighted_mean: bool = False
    import_path: Text | None = None
    kwargs: dict[str, JsonValue] = {}


class OrchCkpt(Section):
    """orch.yaml `ckpt`."""

    interval: Count | None = None  # steps
    resume_step: Annotated[int, Field(ge=-1)] | None = None  # -1: the newest
    wait_for_weights_timeout: Positive | None = None  # seconds, after resuming
    keep_last: Count | None = None
    keep_interval: Count | None = None  # kept for good, every so many steps
    skip_progress: bool = False
    skip_buffer: bool = False


class OrchEval(Section):
    """orch.yaml `eval`."""

    env: OrchEnvs
    num_examples: Annotated[int, Field(ge=-1)] = -1  # -1: all
    rollouts_per_example: Count = 1
    interval: Count = 100  # steps
    eval_base_model: bool = True
    skip_eval_on_resume: bool = True
    cancel_inflight_rollouts_on_eval: bool = False


class ReportTo(Section):
    """orch.yaml `report_to`."""

    project: Annotated[str, only("Surogate", why=NO_TRACKER)] = "Surogate"
    name: Annotated[str | None, only(None, why=NO_TRACKER)] = None
    offline: Annotated[bool, only(False, why=NO_TRACKER)] = False
    samples: Annotated[JsonValue, only(None, why=NO_TRACKER)] = None  # log responses
    distributions: Annotated[JsonValue, only(None, why=NO_TRACKER)] = None
    interval: Annotated[int, only(10, why=NO_TRACKER)] = 10


class RolloutTransport(RolloutTransportConfig):
    """orch.yaml `rollout_transport`."""

    port: Port = 5555


class WeightBroadcast(WeightBroadcastConfig):
    """orch.yaml `weight_broadcast`."""

    type: Literal["filesystem", "nccl"] = "filesystem"
    port: Port = 29501


class OrchFile(Section):
    """orch.yaml."""

    model: OrchModel = OrchModel()
    env: OrchEnvs
    batch_size: Count = 128  # rollouts
    rollouts_per_example: Count = 1
    seq_len: Count = 2048  # tokens of the longest packed sequence
    max_steps: Count | None = None  # null: endless
    max_async_level: Whole = 1
    max_off_policy_steps: Whole = 8  # updates that a rollout in flight survives
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0  # requests over those of a batch
    output_dir: Text = "outputs/run_default"
    seed: Seed = 42
    sampling: OrchSampling = OrchSampling()
    client: OrchClient = OrchClient()
    buffer: Buffer = Buffer()
    advantage: Advantage = Advantage()
    filters: Annotated[tuple[FilterConfig, ...], Strict(False)] = ()
    ckpt: OrchCkpt = OrchCkpt()
    eval: OrchEval | None = None  # null: none
    report_to: ReportTo = ReportTo()
    rollout_transport: RolloutTransport = RolloutTransport()
    weight_broadcast: WeightBroadcast = WeightBroadcast()

    @model_validator(mode="after")
    def _check(self) -> OrchFile:
        problem = _ratio_problem(self.buffer.env_ratios, len(self.env))
        advantage = self.advantage
        if problem:
            where: Path = ("buffer", "env_ratios")
        elif advantage.type == "custom" and advantage.import_path is None:
            where, problem = ("advantage", "type"), "custom needs advantage.import_path"
        elif advantage.type == "custom" and advantage.length_weighted_mean:
            where, problem = ("advantage", "length_weighted_mean"), "is for type: default"
        elif advantage.type == "default" and advantage.import_path is not None:
            where, problem = ("advantage", "import_path"), "is for type: custom"
        elif advantage.type == "default" and advantage.kwargs:
            where, problem = ("advantage", "kwargs"), "is for type: custom"
        else:
            return self
        raise PydanticCustomError(
            "combination", "{text}", {"text": problem, "problems": [((where,), problem)]}
        )


def _ratio_problem(ratios: tuple[float, ...] | None, envs: int) -> str:
    if ratios is None:
        return ""
    if len(ratios) != envs:
        return f"{len(ratios)} ratios for {envs} environments"
    return "" if sum(ratios) > 0 else "they must sum to more than 0"
