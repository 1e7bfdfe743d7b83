"""The keys of the Surogate GRPO document: its train, infer and orch files, names and defaults as
documented.

Each file is a strict model, so that an unknown key is an error with its line. `only(...)` marks an
unsupported key: it is accepted at its neutral values, and otherwise refused with the reason.
`table.py` says where each of the others acts. The comments are the document's meaning of a key.
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

    enabled: bool = False  # put noise on the norms of the rollouts
    sigma_start: NotNegative = 5e-2  # standard deviation of the first stage with noise
    sigma_end: NotNegative = 5e-4  # and of the last
    num_stages: Count = 10  # intervals of the run; the first has no noise


class TrainFile(Section):
    """train.yaml."""

    model: Text  # folder or hub id
    output_dir: Text = "output"  # the folder that holds the orchestrator's run_* folders
    gpus: Count = 1  # GPUs of the trainer
    # what several GPUs share: optimizer states (1), ...
    zero_level: Annotated[
        int, only(1, why="what several GPUs share is all or nothing: the override train.sharding")
    ] = 1
    sequence_len: Count = 1024  # longest packed sequence of the trainer
    per_device_train_batch_size: Count = 2  # packed sequences in a forward pass
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
    logging_steps: Count = 1  # steps between two lines of the log
    learning_rate: Rate = 2e-4  # of the optimizer, after the warm-up
    lr_scheduler_type: Schedule = "constant"  # its course over the run
    warmup_steps: Whole = 0  # steps in which it rises to its value
    max_grad_norm: Positive = 1.0  # longer gradients are cut to this length
    weight_decay: NotNegative = 0.01  # AdamW's
    optimizer: Literal["adamw_8bit", "adamw"] = "adamw_8bit"  # moments in 8 bits, or not
    # precision of the trainer's products
    recipe: Literal["bf16", "fp8-hybrid", "fp8_hybrid", "nvfp4"] = "bf16"
    lora: bool = True  # learn adapters, and not the model
    lora_rank: Count = 16  # rank of the adapters
    lora_alpha: Positive = 32.0  # their scale, times the rank
    # the matrices that have one
    lora_target_modules: Annotated[Strings, Field(min_length=1)] = LORA_TARGETS
    qlora_fp8: bool = False  # the frozen base in FP8
    qlora_bnb: bool = False  # the frozen base in NF4
    qlora_fp4: bool = False  # the frozen base in NVFP4
    loss: SurogateLoss = SurogateLoss()
    noise_scheduler: NoiseScheduler = NoiseScheduler()
    transport_type: Literal["filesystem", "zmq"] = "filesystem"  # how batches reach the trainer
    max_async_level: Whole = 1  # steps that the rollouts may lag behind

    @model_validator(mode="after")
    def _check(self) -> TrainFile:
        """Return the file itself. A validation error for bases that cannot work together, or with
        the file's recipe."""
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


# the format of the rollouts and of the base, and that of the learner's forward
BASES = {"qlora_fp8": "fp8", "qlora_bnb": "nf4", "qlora_fp4": "nvfp4"}
RECIPES = {"fp8-hybrid": "fp8", "fp8_hybrid": "fp8", "nvfp4": "nvfp4"}


class InferFile(Section):
    """infer.yaml."""

    model: Text | None = None  # folder or hub id
    host: Text | None = None  # address to listen at
    port: Port = 8000  # port to listen at
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"  # of the engine's computation
    max_model_len: Count | None = None  # longest context, tokens
    enforce_eager: bool = False  # no CUDA graphs, for debugging
    # run the code of a model's repository
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
    enable_lora: bool = True  # take adapters while serving
    max_lora_rank: Count | None = None  # highest rank of an adapter
    max_loras: Annotated[int, only(8, why=ONE_ADAPTER)] = 8  # adapters loaded at a time
    max_cpu_loras: Annotated[int, only(100, why=ONE_ADAPTER)] = 100  # and kept on the CPU
    enable_prefix_caching: bool | None = None  # prompts with the same beginning share its pages
    # share of the GPU's memory for the engine
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    weight_broadcast_type: Literal["filesystem", "nccl"] = "filesystem"  # how new weights come
    reasoning_parser: Annotated[str | None, only(None, why=ONE_ANSWER)] = None  # of thoughts
    # let the model call tools
    enable_auto_tool_choice: Annotated[bool, only(False, why=ONE_ANSWER)] = False
    # scaling of the rotary positions
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

    name: Text | None = None  # folder or hub id
    # under which name the engine has the adapter
    lora_adapter: Annotated[
        str | None, only("default", None, why="the run's adapter has no other name")
    ] = None
    lora_rank: Count | None = None  # as in train.yaml
    lora_alpha: Positive | None = None  # as in train.yaml


class OrchSampling(Section):
    """orch.yaml `sampling`."""

    max_tokens: Count | None = None  # longest response
    temperature: Positive = 1.0  # of the sampler; or temp_scheduler
    temp_scheduler: TemperatureConfig | None = None  # a temperature that moves over the run
    repetition_penalty: Positive = 1.0  # on tokens that were drawn before
    min_tokens: Whole = 0  # shortest response
    seed: Seed | None = None  # of what is drawn


class OrchEnv(Section):
    """orch.yaml `env[]` and `eval.env[]`."""

    id: Text  # which environment
    name: Text | None = None  # what its metrics are called
    args: dict[str, JsonValue] = {}  # the environment's own arguments
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

    # addresses of the engines
    base_url: Annotated[Strings, Field(min_length=1)] = ("http://localhost:8000/v1",)
    timeout: Positive = 1200  # seconds that a request may take
    api_key_var: Text = "VLLM_API_KEY"  # environment variable with their key
    skip_model_check: bool = False  # do not ask an engine which model it serves
    elastic: ElasticConfig = ElasticConfig()


class Buffer(BufferConfig):
    """orch.yaml `buffer`: choosing problems by difficulty."""

    hash_keys: Strings = ("task", "prompt")  # what makes two examples the same
    # shares of the environments
    env_ratios: Annotated[tuple[NotNegative, ...], Strict(False)] | None = None


class Advantage(Section):
    """orch.yaml `advantage`."""

    type: Literal["default", "custom"] = "default"  # the group's mean as a baseline, or your own
    length_weighted_mean: bool = False  # a mean weighted by the responses' lengths
    import_path: Text | None = None  # custom: the function
    kwargs: dict[str, JsonValue] = {}  # custom: its further arguments


class OrchCkpt(Section):
    """orch.yaml `ckpt`."""

    interval: Count | None = None  # steps between checkpoints
    resume_step: Annotated[int, Field(ge=-1)] | None = None  # go on from it; -1: the newest
    wait_for_weights_timeout: Positive | None = None  # seconds, when a run is resumed
    keep_last: Count | None = None  # so many are kept
    keep_interval: Count | None = None  # and every so many steps one, for good
    skip_progress: bool = False  # leave the progress of a checkpoint
    skip_buffer: bool = False  # leave the buffer of a checkpoint


class OrchEval(Section):
    """orch.yaml `eval`."""

    env: OrchEnvs  # the environments
    num_examples: Annotated[int, Field(ge=-1)] = -1  # of each environment; -1: all
    rollouts_per_example: Count = 1  # responses to each
    interval: Count = 100  # steps between evaluations
    eval_base_model: bool = True  # evaluate before the first step, too
    skip_eval_on_resume: bool = True  # a resumed run does not evaluate at once
    cancel_inflight_rollouts_on_eval: bool = False  # what is in flight is aborted for it


class ReportTo(Section):
    """orch.yaml `report_to`."""

    project: Annotated[str, only("Surogate", why=NO_TRACKER)] = "Surogate"  # W&B's
    name: Annotated[str | None, only(None, why=NO_TRACKER)] = None  # of the run at W&B
    offline: Annotated[bool, only(False, why=NO_TRACKER)] = False  # W&B without a network
    samples: Annotated[JsonValue, only(None, why=NO_TRACKER)] = None  # log responses
    distributions: Annotated[JsonValue, only(None, why=NO_TRACKER)] = None  # log distributions
    interval: Annotated[int, only(10, why=NO_TRACKER)] = 10  # steps between two reports


class RolloutTransport(RolloutTransportConfig):
    """orch.yaml `rollout_transport`."""

    port: Port = 5555  # zmq: port to listen at


class WeightBroadcast(WeightBroadcastConfig):
    """orch.yaml `weight_broadcast`."""

    type: Literal["filesystem", "nccl"] = "filesystem"  # how weights reach the engines
    port: Port = 29501  # nccl: at this port


class OrchFile(Section):
    """orch.yaml."""

    model: OrchModel = OrchModel()
    env: OrchEnvs  # the environments
    batch_size: Count = 128  # rollouts a step
    rollouts_per_example: Count = 1  # responses to a prompt
    seq_len: Count = 2048  # longest sequence, prompt and response, for packing
    max_steps: Count | None = None  # null: without an end
    max_async_level: Whole = 1  # steps that the rollouts may lag behind
    max_off_policy_steps: Whole = 8  # updates that a rollout in flight survives
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0  # requests, over those of a batch
    output_dir: Text = "outputs/run_default"  # the run's folder
    seed: Seed = 42  # of the run
    sampling: OrchSampling = OrchSampling()
    client: OrchClient = OrchClient()
    buffer: Buffer = Buffer()
    advantage: Advantage = Advantage()
    filters: Annotated[tuple[FilterConfig, ...], Strict(False)] = ()
    ckpt: OrchCkpt = OrchCkpt()
    eval: OrchEval | None = None  # evaluation in the course of the run; null: none
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
