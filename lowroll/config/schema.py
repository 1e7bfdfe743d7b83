"""The run's configuration: one frozen tree of settings, read as `cfg.rollout.max_tokens`.

Every section is a strict pydantic model: an unknown key, text where a number belongs, a boolean
where a count belongs and a non-finite number are errors, and so are settings that cannot work
together (`RunConfig` checks these last, all at once). `null` means "the default of the algorithm";
`RunConfig.resolved()` fills all such gaps, `notes` says why, and `dump()` writes the resolved tree
as YAML that loads to the same tree again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, Field, JsonValue, Strict, model_validator
from pydantic_core import PydanticCustomError

from lowroll.config.auto import Rollouts, choose_correction, choose_row, known_collapse
from lowroll.config.buffer import (
    AdvantageFunction,
    BufferConfig,
    buffer_notes,
    buffer_problems,
    resolved_advantage,
)
from lowroll.config.ckpt import CkptConfig
from lowroll.config.critic import CriticConfig, critic_notes, critic_problems
from lowroll.config.data import (
    DataSection,
    RewardFunctions,
    RewardWeights,
    data_problems,
    environments,
)
from lowroll.config.document import ConfigDumper, dotted
from lowroll.config.env import EnvConfig, Environments, EvalConfig, env_problems, eval_notes, named
from lowroll.config.exact import exact_problems
from lowroll.config.guard import GuardConfig
from lowroll.config.kv import KvConfig, kv_problems
from lowroll.config.loss import LossConfig, loss_notes, loss_problems
from lowroll.config.noise import NoiseConfig, noise_problems
from lowroll.config.passes import Passes, Recomputed
from lowroll.config.ray import RayConfig
from lowroll.config.roles import (
    AsynchronyConfig,
    ClientConfig,
    Launcher,
    RolloutTransportConfig,
    ServeConfig,
    WeightBroadcastConfig,
    role_notes,
    role_problems,
)
from lowroll.config.scoring import FilterConfig, ScoreConfig
from lowroll.config.section import (
    Advantage,
    Algorithm,
    Correction,
    Count,
    GroupSize,
    HubName,
    LargeBatchWeights,
    NotNegative,
    Penalty,
    Positive,
    Probability,
    Problem,
    Rate,
    Schedule,
    Section,
    Temperature,
    Text,
    ToolFormat,
    Trackers,
    unique,
)
from lowroll.config.sft import SftConfig
from lowroll.config.stages import StageConfig, blame, order_problems, stage_notes
from lowroll.config.vllm import EngineName, VllmConfig, vllm_notes, vllm_problems
from lowroll.config.weights import Weights, budget_problems
from lowroll.objectives.table import ALGORITHMS, BOUNDS, CAP, pair
from lowroll.quant.table import DEFAULT, is_dense


class TemperatureConfig(Section):
    """A sampling temperature that moves from start to end over the run."""

    type: Literal["linear", "cosine"]  # its course
    start_temperature: Temperature  # of the first step
    end_temperature: Temperature  # of the last step


class RolloutConfig(Section):
    """The engine and its sampling. `weights` is the format of its linear weights; `dense` is the
    run's own dtype."""

    engine: EngineName = "native"  # whose rollouts: lowroll's own engine's, or vLLM's
    vllm: VllmConfig = VllmConfig()  # read by engine: vllm alone
    engines: Count = 1  # that a run with roles has, each a process (on a GPU of its own)
    # format of the linear weights, or a budget (max_kl, max_bits, max_bytes, formats) under which each
    # layer gets one; dense: the run's dtype; stored: the codes that the model's folder holds
    weights: Weights = DEFAULT
    # true: a token's recorded log-prob is, bit for bit, what the learner computes before its update,
    # which multiplies in the rollouts' formats then (train.forward: aligned); on a CPU in float32. null:
    # on a CPU, where they can: the engine, and a learner that is aligned; on a GPU both, beside an
    # aligned LoRA learner of INT8 codes. false: neither
    exact: bool | None = None
    kv: KvConfig | None = None  # the cache's policy and dtype; null: every key, in the engine's own
    max_tokens: Count = 64  # a response's longest length, in tokens
    min_tokens: Annotated[int, Field(ge=0)] = 0  # a response's shortest length, in tokens
    temperature: Temperature = 1.0  # of the sampler
    temp_scheduler: TemperatureConfig | None = None  # takes the place of `temperature`
    top_p: Probability = 1.0  # the likeliest tokens that together have this probability
    top_k: Annotated[int, Field(ge=0)] = 0  # 0 is off
    # tokens with this share of the likeliest one's probability
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: Penalty = 1.0  # on tokens that stand in the text already; 1 is off
    stop: Annotated[tuple[Text, ...], Strict(False)] = ()  # stop strings
    # how the model writes calls of tools; null: as its chat template shows it
    tool_call_parser: ToolFormat | None = None
    page_size: Count = 16  # tokens in a page of the KV cache
    max_batch: Count = 256  # sequences decoded together
    # a second format, used while many rows decode
    large_batch_weights: LargeBatchWeights | None = None
    keep_dense: bool = False  # 4 bits on CUDA: dense weights beside, for many rows
    release_cache: bool = False  # give the cache's memory to the learner between rollouts
    cache_tokens: Count | None = None  # tokens that the KV cache holds; null: what the run uses
    prefill_chunk: Count | None = None  # prompt tokens a sequence prefills in one step; null: all
    # tokens of a prompt and its response; longer prompts are passed over. null: what a micro-batch
    # and the model's context hold
    max_model_len: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # of what is drawn; null: the run's
    cuda_graphs: bool = True  # false: kernels are started one by one, to look for a fault
    prefix_caching: bool = True  # pages of a prompt serve a later one with the same beginning
    # pages of drawn tokens, too: a conversation's next turn runs what is new of it alone. Last bits
    # of its log-probs are others then
    turn_caching: bool = False
    # share of the GPU's memory that the engine may fill with weights and cache; null: what the run
    # can use
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def cache(self) -> KvConfig:
        """`kv`, of which null is the dense cache."""
        return self.kv or KvConfig()

    def with_kv(self, kv: KvConfig | None) -> RolloutConfig:
        """The same settings with another cache."""
        return self if kv == self.kv else self.model_copy(update={"kv": kv})


class DapoConfig(Section):
    """DAPO's sampling and length rules (they may be switched on for any algorithm). Lengths in
    tokens."""

    dynamic_sampling: bool | None = None  # draw again for groups whose rewards are all equal
    max_rounds: Count = 8  # rounds of generation that a step may spend on it
    # no group differs in all rounds: the run ends, or goes on
    no_signal: Literal["end", "go_on"] = "end"
    overlong_max: Count | None = None  # Lmax: at this length the penalty is -1
    overlong_cache: Count | None = None  # Lc: the penalty starts at Lmax - Lc


class TrainConfig(Passes):
    """The learner. One batch gives `minibatches` optimiser updates."""

    max_steps: Count = 100  # steps of the run
    gpus: Count = 1  # of the learner: ranks, each a process with a GPU, that learn together
    # what several of them hold: each the whole model, or each a part; auto: parts, unless an adapter
    # learns
    sharding: Literal["auto", "none", "full"] = "auto"
    minibatches: Count = 1  # optimiser updates a batch
    # packed tokens of a forward pass; a prompt and its response must fit in; null: 8192, and fewer on
    # a CPU where that saves memory
    tokens_per_microbatch: Count | None = None
    learning_rate: Rate = 1e-5  # after the warm-up
    lr_scheduler_type: Schedule = "constant"  # its course from then on
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # steps in which it rises
    # where linear and cosine end, over learning_rate
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_decay: NotNegative = 0.01  # decoupled
    # of the moments
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        Strict(False),
    ] = (0.9, 0.999)
    eps: Positive = 1e-8  # added to the root of the second moment
    max_grad_norm: Positive = 1.0  # longer gradients are cut to this length
    # 8bit: moments in 8 bits; muon: for hidden matrices
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    # aligned: in the rollouts' low-bit arithmetic (QaRL); a format: in its arithmetic, whatever the
    # rollouts are in
    forward: Literal["dense", "aligned", "fp8", "nvfp4"] = "dense"
    # how gradients pass through the linear layers; fp8: by products of e4m3 codes. Gradients of the
    # weights stay in the run's dtype
    backward: Literal["dense", "fp8"] = "dense"
    teacher: Text | None = None  # the frozen model of loss.aipo.teacher_tau: a folder, hub id
    uaq_scale: Positive | None = None  # QuRL's update-aware scaling; it uses 1.5
    weight_metrics: bool = True  # weights/*, at the price of a copy of what is learnt
    # true: whole layers are made again in the backward pass; a number: the gate-up product of this
    # share of them; null: false, and true on a CPU where smaller micro-batches are not enough
    activation_checkpointing: Recomputed = None
    # tokens whose logits exist at a time; null: 1024, and 256 on a CPU where that saves memory
    logprob_chunk: Count | None = None
    # the learner attends to what a bounded cache held, and so scores the sparse policy itself
    replay_kv: bool = False
    lora: bool = False  # learn adapters on a frozen base
    lora_rank: Count = 16  # rank of the adapters
    lora_alpha: Positive = 32.0  # their scale, times the rank
    # the matrices that have one
    lora_target_modules: Annotated[
        tuple[Text, ...], Strict(False), Field(min_length=1), AfterValidator(unique)
    ] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class RunConfig(Section):
    """One run. Load it with `lowroll.config.load`; every field but `model` has a default."""

    model: Text  # a folder or a hub id
    output_dir: Text = "outputs/run"  # the run's folder, from the working directory
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of everything that is drawn
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where the run computes
    # auto: float32 on the CPU, bfloat16 on a GPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    env: Environments = (EnvConfig(id="reverse-text"),)
    data: DataSection | None = None  # in the place of env: a data set of your own
    # how its responses are scored: path/to/file.py:function, or a reward model; []: answer, whether the final answer
    # is the gold one
    reward_funcs: RewardFunctions = ()
    reward_weights: RewardWeights | None = None  # of these, in their order; null: 1 each
    # variables of the model's chat template, such as {enable_thinking: false}, for every prompt
    chat_template_kwargs: dict[str, JsonValue] = {}
    logging_steps: Count = 1  # the terminal says every so many steps; metrics.jsonl has all
    # what shows the records elsewhere too; the extra of that name installs it
    track: Trackers = ()
    track_project: Text = "lowroll"  # the project, or experiment, of the run there
    # ORG/NAME on the hub: where final/ goes at the end, as a private repository
    push_to_hub: HubName | None = None
    batch_size: Count = 64  # rollouts a step
    rollouts_per_example: GroupSize = 8  # G, the group's size
    rollout: RolloutConfig = RolloutConfig()
    algorithm: Algorithm = "grpo"  # how rewards become a loss: docs/algorithms.md
    advantage: Advantage | None = None  # null: the algorithm's; custom: advantage_function's
    advantage_function: AdvantageFunction | None = None
    correction: Correction = "auto"  # what pays for the gap between rollouts and learner
    force: bool = False  # run what is known to collapse, to compare with
    loss: LossConfig = LossConfig()
    critic: CriticConfig = CriticConfig()  # read by ppo alone
    dapo: DapoConfig = DapoConfig()
    filters: Annotated[tuple[FilterConfig, ...], Strict(False)] = ()
    train: TrainConfig = TrainConfig()
    stages: Annotated[
        tuple[StageConfig, ...], Strict(False)
    ] = ()  # what changes in the course of the run
    noise: NoiseConfig | None = None
    score: ScoreConfig = ScoreConfig()
    buffer: BufferConfig = BufferConfig()  # which prompts are learnt from
    guard: GuardConfig | None = GuardConfig()  # watches the mismatch; null: nothing does
    ckpt: CkptConfig = CkptConfig()
    eval: EvalConfig = EvalConfig()
    sft: SftConfig = SftConfig()
    # engine, orchestrator and trainer as processes: here (local), or on a Ray cluster (ray)
    launcher: Launcher = "none"
    ray: RayConfig = RayConfig()
    asynchrony: AsynchronyConfig = AsynchronyConfig()
    client: ClientConfig = ClientConfig()
    serve: ServeConfig = ServeConfig()
    rollout_transport: RolloutTransportConfig = RolloutTransportConfig()
    weight_broadcast: WeightBroadcastConfig = WeightBroadcastConfig()
    _notes: tuple[str, ...] = ()
    _given: str | None = None
    _source: str = "settings"
    _chosen: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = list(_problems(self))
        if problems:
            text = "; ".join(f"{dotted(keys[0])}: {message}" for keys, message in problems)
            raise PydanticCustomError("combination", "{text}", {"text": text, "problems": problems})
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """The choices made for the user and the settings that deserve a second look, one line
        each."""
        return self._notes

    @property
    def chosen_options(self) -> tuple[str, ...]:
        """Options of the objective that `correction: auto` chose; the measured mismatch may widen
        them."""
        return self._chosen

    @property
    def given(self) -> str | None:
        """The YAML text that an orchestrator started with orch.yaml alone leaves in the run's
        folder for a trainer that has train.yaml alone (`surogate.roles.GIVEN`); else None."""
        return self._given

    @property
    def source(self) -> str:
        """The file that it was read from, for messages."""
        return self._source

    @property
    def num_groups(self) -> int:
        """Prompts a step."""
        return self.batch_size // self.rollouts_per_example

    @property
    def is_env_given(self) -> bool:
        """Was an environment written?"""
        return "env" in self.model_fields_set

    @property
    def has_critic(self) -> bool:
        """Does a critic learn beside the model?"""
        return ALGORITHMS[self.algorithm].has_critic

    @property
    def samples_dynamically(self) -> bool:
        """Are groups whose rewards are all equal drawn again?"""
        asked = self.dapo.dynamic_sampling
        return ALGORITHMS[self.algorithm].dynamic_sampling if asked is None else asked

    def at(self, step: int) -> RunConfig:
        """The settings of a step (counted from 1): those of the stages that have begun laid over
        the run's own."""
        cfg = self
        for stage in self.stages:
            cfg = _enter(cfg, stage) if stage.step <= step else cfg
        return cfg

    def each_stage(self) -> list[RunConfig]:
        """The settings of the run's beginning, and those of every later stage."""
        return [self, *(self.at(stage.step) for stage in self.stages)]

    @property
    def is_sharded(self) -> bool:
        """Does each rank of the learner hold a part of it? Where all weights learn, unless the file
        says otherwise."""
        asked = self.train.sharding
        return self.train.gpus > 1 and (
            asked == "full" or (asked == "auto" and not self.train.lora)
        )

    @property
    def forward(self) -> str:
        """The learner's forward; beside exact rollouts it multiplies as they do."""
        if not self.rollout.exact:
            return self.train.forward
        return "dense" if is_dense(self.rollout.weights) else "aligned"

    @property
    def forward_weights(self) -> str | None:
        """The format of the learner's forward; None: the learner multiplies with its own weights."""
        forward = self.forward
        if forward == "dense":
            return None
        return self.rollout.weights if forward == "aligned" else forward

    @property
    def objective_options(self) -> dict[str, Any]:
        """The options of `objectives.objective.select(cfg.algorithm, cfg.correction)`, with the
        defaults filled in."""
        cfg = self.resolved()
        return cfg.loss.options(cfg.algorithm, cfg.correction, cfg.rollout.max_tokens)

    def with_notes(self, *lines: str) -> RunConfig:
        """A copy that carries these notes too."""
        copy = self.model_copy()
        copy._notes = self._notes + tuple(line for line in lines if line not in self._notes)
        return copy

    def with_source(self, name: str) -> RunConfig:
        """A copy that was read from this file."""
        copy = self.model_copy()
        copy._source = name
        return copy

    def with_given(self, text: str) -> RunConfig:
        """A copy that leaves this for a trainer."""
        copy = self.model_copy()
        copy._given = text
        return copy

    def sized(self) -> RunConfig:
        """A copy whose open sizes of the learner's passes are those of a device with room."""
        return self.model_copy(update={"train": self.train.sized()})

    def resolved(self) -> RunConfig:
        """The same run with every `auto` and null that a table decides filled in (device, dtype and
        the sizes of the learner's passes stay: they are the machine's). Idempotent."""
        default = ALGORITHMS[self.algorithm]
        correction, reason = _correction(self)
        options = pair(self.algorithm, correction).options
        # of a correction that does not clip or cap there are no bounds, and nobody reads the cap
        defaults = {"cap": CAP, **dict.fromkeys(BOUNDS), **options}
        loss = {
            name: defaults[name]
            for name in ("cap", *BOUNDS, "reduce")
            if getattr(self.loss, name) is None
        }
        chosen = _thresholds(self)
        if chosen:
            loss[correction] = getattr(self.loss, correction).model_copy(update=chosen)
        copy = self.model_copy(
            update={
                **resolved_advantage(self, default.advantage),
                "correction": correction,
                "loss": self.loss.model_copy(update=loss),
                "train": self.train.model_copy(update={"forward": self.forward}),
                "rollout": self.rollout.with_kv(self.rollout.kv and self.rollout.kv.resolved()),
                "dapo": self.dapo.model_copy(update={"dynamic_sampling": self.samples_dynamically}),
                "env": tuple(named(env) for env in environments(self)),
                "data": None,
                "reward_funcs": (),
                "reward_weights": None,
                "eval": self.eval.model_copy(
                    update={"env": self.eval.env and tuple(map(named, self.eval.env))}
                ),
            }
        )
        copy._chosen = self._chosen or tuple(chosen)
        because = (f"correction: {correction}, because {reason}",) if reason else ()
        return copy.with_notes(*because, *_warnings(copy))

    def tree(self) -> dict[str, Any]:
        """The resolved settings as plain values: what loading `dump()` gives."""
        return self.resolved().model_dump(mode="json")

    def dump(self) -> str:
        """YAML text of the resolved tree; loading it gives the same tree."""
        return yaml.dump(
            self.tree(), Dumper=ConfigDumper, sort_keys=False, allow_unicode=True, width=10**6
        )


def rollouts_of(cfg: RunConfig) -> Rollouts:
    """Return the properties of the rollouts that `auto` looks at."""
    rollout = cfg.rollout
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
    cut = {name: getattr(rollout, name) for name in off if getattr(rollout, name) != off[name]}
    second = rollout.large_batch_weights if rollout.large_batch_weights != rollout.weights else None
    # a dense second format is that of LoRA's own base
    low_bit = second is not None and not is_dense(second)
    return Rollouts(
        f"{rollout.weights}+{second}" if low_bit else rollout.weights,
        truncated=tuple(f"{name} {value}" for name, value in cut.items()),
        noisy=cfg.noise is not None and cfg.noise.learner == "clean",
        exact=bool(rollout.exact),
        aligned=cfg.forward in ("aligned", rollout.weights) and second is None,
        rounds=cfg.forward not in ("dense", "aligned", rollout.weights),
        lora=cfg.train.lora and not low_bit,
        kv_policy=rollout.cache.policy,
        kv_dtype=rollout.cache.kv_dtype,
        replayed=cfg.train.replay_kv,
        engine=rollout.engine,
    )


def _correction(cfg: RunConfig) -> tuple[str, str]:
    """The run's correction, and why when `auto` chose it."""
    if cfg.correction != "auto":
        return cfg.correction, ""
    return choose_correction(cfg.algorithm, rollouts_of(cfg))


def _thresholds(cfg: RunConfig) -> dict[str, float]:
    """Options of the correction's own section that `auto` chooses and the file does not."""
    row = choose_row(rollouts_of(cfg))
    if cfg.correction != "auto" or not row.sets or _correction(cfg)[0] != row.correction:
        return {}
    written = getattr(cfg.loss, row.correction).model_fields_set
    return {name: value for name, value in row.sets.items() if name not in written}


def _enter(cfg: RunConfig, stage: StageConfig) -> RunConfig:
    update: dict[str, Any] = {}
    for section, values in stage.changes().items():
        update |= {section: getattr(cfg, section).model_copy(update=values)} if section else values
    return cfg.model_copy(update=update)


def _problems(cfg: RunConfig) -> Iterator[Problem]:
    """Settings that cannot work together."""
    yield from _batch_problems(cfg)
    yield from _stage_problems(cfg)
    yield from kv_problems(cfg.rollout.kv)
    yield from vllm_problems(cfg)
    yield from buffer_problems(cfg)
    yield from role_problems(cfg)
    yield from exact_problems(cfg)
    yield from budget_problems(
        cfg.rollout.weights, cfg.rollout.engine, cfg.rollout.large_batch_weights
    )
    rounds, base = cfg.forward_weights, cfg.rollout.weights
    if cfg.train.lora and rounds not in (None, base) and not is_dense(base):
        yield (
            (("train", "forward"), ("rollout", "weights")),
            f"the adapter's base is {base}, and the learner multiplies with what it holds; write "
            "aligned or dense",
        )
    if cfg.rollout.temp_scheduler is not None and cfg.rollout.temperature != 1.0:
        yield (
            (("rollout", "temp_scheduler"), ("rollout", "temperature")),
            "set either rollout.temperature or rollout.temp_scheduler, not both",
        )
    yield from loss_problems(cfg.algorithm, _correction(cfg)[0], cfg.loss)
    if not cfg.force and (collapse := known_collapse(cfg.correction, rollouts_of(cfg))):
        cheap = f"{cfg.rollout.weights} rollouts"
        if collapse.price == "kv":
            cheap = f"a cache that {cfg.rollout.cache.policy} bounds"
        yield (
            (("correction",), ("rollout", collapse.price)),
            f"{cfg.correction} with {cheap} is known to collapse ({collapse.seen}); write "
            "auto, or force: true to compare with it",
        )
    if _correction(cfg)[0] == "aipo" and cfg.loss.aipo.teacher_tau and cfg.train.teacher is None:
        yield (
            (("loss", "aipo", "teacher_tau"), ("train", "teacher")),
            "needs train.teacher, the model whose log-probs it pulls to",
        )
    yield from critic_problems(
        cfg.algorithm, cfg.advantage, cfg.dapo.dynamic_sampling, cfg.critic, cfg.train.max_steps
    )
    yield from noise_problems(cfg.noise)
    for section, key in ((cfg.train, "train"), (cfg.sft, "sft")):
        steps = cfg.train.max_steps if section is cfg.train else cfg.sft.steps
        if section.warmup_steps > steps:
            yield (
                ((key, "warmup_steps"), (key, "max_steps" if key == "train" else "steps")),
                f"{key}.warmup_steps ({section.warmup_steps}) is more than the {steps} steps of the run",
            )
    yield from env_problems(cfg.env, cfg.eval)
    yield from data_problems(cfg)


def _batch_problems(cfg: RunConfig) -> Iterator[Problem]:
    advantage = cfg.advantage or ALGORITHMS[cfg.algorithm].advantage
    if cfg.rollouts_per_example == 1 and advantage != "gae":
        yield (
            (("rollouts_per_example",), ("algorithm",)),
            f"one rollout has no group that {advantage} could compare it with; write 2 or more, or algorithm: ppo, "
            "whose critic needs no group",
        )
    if cfg.batch_size % cfg.rollouts_per_example:
        yield (
            (("batch_size",), ("rollouts_per_example",)),
            f"batch_size ({cfg.batch_size}) is not a multiple of rollouts_per_example ({cfg.rollouts_per_example})",
        )
    elif cfg.num_groups % cfg.train.minibatches:
        yield (
            (("train", "minibatches"), ("batch_size",), ("rollouts_per_example",)),
            f"the {cfg.num_groups} groups of a batch (batch_size / rollouts_per_example) cannot be split into "
            f"{cfg.train.minibatches} equal minibatches",
        )
    yield from _length_problems(cfg)


def _stage_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Yield the problems of the stages, and of the run's settings as they are in each stage."""
    yield from order_problems(cfg.stages, cfg.dapo.overlong_max)
    known, now = [message for _, message in _batch_problems(cfg)], cfg
    for i, stage in enumerate(cfg.stages):
        now = _enter(now, stage)
        for keys, message in _batch_problems(now):
            if message not in known:
                yield blame(i, (keys, message))
                known.append(message)


def _length_problems(cfg: RunConfig) -> Iterator[Problem]:
    rollout, dapo = cfg.rollout, cfg.dapo
    if rollout.min_tokens > rollout.max_tokens:
        yield (
            (("rollout", "min_tokens"), ("rollout", "max_tokens")),
            f"rollout.min_tokens ({rollout.min_tokens}) is more than rollout.max_tokens ({rollout.max_tokens})",
        )
    if rollout.max_model_len is not None and rollout.max_model_len <= rollout.max_tokens:
        yield (
            (("rollout", "max_model_len"), ("rollout", "max_tokens")),
            f"rollout.max_model_len ({rollout.max_model_len}) cannot hold a prompt and its response "
            f"of up to {rollout.max_tokens} tokens (rollout.max_tokens)",
        )
    held = rollout.cache_tokens
    # what a bounded cache needs is its policy's arithmetic (`runs.assembly.prompts`)
    if held is not None and held <= rollout.max_tokens and not rollout.cache.evicts:
        yield (
            (("rollout", "cache_tokens"), ("rollout", "max_tokens")),
            f"rollout.cache_tokens ({rollout.cache_tokens}) cannot hold a prompt and its response of up to "
            f"{rollout.max_tokens} tokens (rollout.max_tokens)",
        )
    if cfg.train.longest <= rollout.max_tokens:
        yield (
            (("train", "tokens_per_microbatch"), ("rollout", "max_tokens")),
            f"train.tokens_per_microbatch ({cfg.train.longest}) cannot hold a prompt and its response "
            f"of up to {rollout.max_tokens} tokens (rollout.max_tokens)",
        )
    if (dapo.overlong_max is None) != (dapo.overlong_cache is None):
        given, absent = "overlong_cache", "overlong_max"
        if dapo.overlong_cache is None:
            given, absent = absent, given
        yield ((("dapo", given),), f"needs dapo.{absent} beside it")
    elif dapo.overlong_max is not None and dapo.overlong_cache is not None:
        if dapo.overlong_cache > dapo.overlong_max:
            yield (
                (("dapo", "overlong_cache"), ("dapo", "overlong_max")),
                f"dapo.overlong_cache ({dapo.overlong_cache}) is more than dapo.overlong_max ({dapo.overlong_max})",
            )


def _warnings(cfg: RunConfig) -> Iterator[str]:
    """Settings that work, but rarely as meant. `cfg` is resolved."""
    rollout, price = cfg.rollout, rollouts_of(cfg)
    if price.truncated and cfg.correction == "none":
        yield (
            f"warning: {', '.join(price.truncated)}: the rollouts are drawn from another distribution than the "
            "learner's, and correction none does not pay for it"
        )
    if price.low_bit and cfg.correction in ("none", "is"):
        yield (
            f"warning: {rollout.weights} rollouts with correction {cfg.correction}: the mismatch with the learner "
            "is not corrected; good for comparison only"
        )
    if price.low_bit and cfg.correction == "decoupled":
        yield (
            f"warning: {rollout.weights} rollouts with correction decoupled: nothing caps the weights, and QuRL "
            "(Fig. 3) saw them reach 1e5; tis and acr cap them"
        )
    if price.forgets and cfg.correction in ("none", "is", "decoupled"):
        yield (
            f"warning: a cache that {price.kv_policy} bounds with correction {cfg.correction}: no response is "
            "rejected that lost what it needed (Sparse-RL sec. 4); sparse and reweight reject"
        )
    if price.low_bit_cache and not price.low_bit and cfg.correction in ("none", "is"):
        yield (
            f"warning: an {price.kv_dtype} cache with correction {cfg.correction}: its rounding is not corrected; "
            "good for comparison only"
        )
    if (
        price.low_bit
        and not price.lora
        and cfg.algorithm == "gspo"
        and cfg.correction in ("tis", "decoupled")
    ):
        yield (
            f"warning: gspo on {rollout.weights} rollouts: QaRL (Fig. 8) saw it drift and collapse; correction tbpo "
            "is its mended form"
        )
    if price.noisy and cfg.correction == "none":
        yield (
            "warning: noise with correction none: rollouts of the noisy policy are learnt from as if they were the "
            "learner's own (QeRL's setting)"
        )
    if cfg.train.forward == "aligned" and is_dense(rollout.weights):
        yield f"train.forward aligned: {rollout.weights} rollouts have no low-bit arithmetic to align with"
    if price.rounds and not price.low_bit and cfg.correction in ("none", "is"):
        yield (
            f"warning: train.forward {cfg.train.forward} with correction {cfg.correction}: the "
            "learner rounds and the rollouts do not, and that is not corrected"
        )
    if price.foreign and not price.low_bit and cfg.correction in ("none", "is"):
        yield (
            f"warning: rollouts of {price.engine} with correction {cfg.correction}: it rounds otherwise than the "
            "learner, and that is not corrected; good for comparison only"
        )
    other = price.forgets or price.low_bit_cache or price.foreign or price.rounds
    faithful = not (price.low_bit or price.truncated or price.noisy or other)
    if faithful and cfg.correction not in ("none", "tbpo", "aipo", "ipo"):
        yield f"correction {cfg.correction}: {rollout.weights} rollouts leave it almost nothing to correct"
    if cfg.train.minibatches == 1 and cfg.correction in ("acr", "tbpo"):
        yield (
            f"train.minibatches 1: with one update a batch the policy ratio is 1, so no clip can fire; "
            f"{cfg.correction} then acts as a capped weight"
        )
    if cfg.train.teacher is not None and not (
        cfg.correction == "aipo" and cfg.loss.aipo.teacher_tau
    ):
        yield "train.teacher: no effect without correction aipo and a loss.aipo.teacher_tau above 0"
    if cfg.train.replay_kv and not rollout.cache.evicts:
        yield "train.replay_kv: no effect without a rollout.kv.policy that drops keys"
    yield from vllm_notes(rollout.engine, rollout.vllm)
    yield from eval_notes(cfg.eval)
    yield from buffer_notes(cfg)
    yield from role_notes(cfg)
    yield from loss_notes(cfg.correction, cfg.loss)
    yield from stage_notes(cfg.stages, cfg.train.max_steps)
    yield from critic_notes(cfg.algorithm, cfg.critic)
