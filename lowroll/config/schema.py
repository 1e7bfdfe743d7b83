"""The tree of a run's settings and its derived properties."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import JsonValue, Strict

from lowroll.config.data import (
    AdvantageFunction,
    BufferConfig,
    DataSection,
    EnvConfig,
    Environments,
    EvalConfig,
    FilterConfig,
    RewardFunctions,
    RewardWeights,
    ScoreConfig,
)
from lowroll.config.loss import LossConfig
from lowroll.config.processes import (
    AsynchronyConfig,
    ClientConfig,
    Launcher,
    RayConfig,
    RolloutTransportConfig,
    ServeConfig,
    WeightBroadcastConfig,
)
from lowroll.config.rollout import NoiseConfig, RolloutConfig
from lowroll.config.section import (
    Advantage,
    Algorithm,
    Correction,
    Count,
    GroupSize,
    HubName,
    Section,
    Seed,
    Text,
    Trackers,
)
from lowroll.config.train import (
    CkptConfig,
    CriticConfig,
    DapoConfig,
    GuardConfig,
    SftConfig,
    StageConfig,
    TrainConfig,
)
from lowroll.objectives.table import ALGORITHMS
from lowroll.quant.table import is_dense


class RunSettings(Section):
    """The keys of a run."""

    model: Text  # folder or hub id
    output_dir: Text = "outputs/run"  # the run's folder, relative to the working directory
    seed: Seed = 0  # of all random draws
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where the run computes
    # auto: float32 on the CPU, bfloat16 on a GPU
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    env: Environments = (EnvConfig(id="reverse-text"),)
    data: DataSection | None = None  # a data set instead of env
    # how its responses are scored: path/to/file.py:function, or a reward model; []: answer, whether
    # the final answer matches the gold one
    reward_funcs: RewardFunctions = ()
    reward_weights: RewardWeights | None = None  # in the functions' order; null: 1 each
    # variables of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: dict[str, JsonValue] = {}
    logging_steps: Count = 1  # steps between lines on the terminal; metrics.jsonl has all
    # trackers that get the records; each needs the extra of its name
    track: Trackers = ()
    track_project: Text = "lowroll"  # the run's project, or experiment, there
    # ORG/NAME on the hub: final/ is uploaded there at the end, as a private repository
    push_to_hub: HubName | None = None
    batch_size: Count = 64  # rollouts a step
    rollouts_per_example: GroupSize = 8  # G, the group's size
    rollout: RolloutConfig = RolloutConfig()
    algorithm: Algorithm = "grpo"  # how rewards become a loss: docs/algorithms.md
    advantage: Advantage | None = None  # null: the algorithm's; custom: advantage_function's
    advantage_function: AdvantageFunction | None = None
    correction: Correction = "auto"  # correction for the mismatch between rollouts and learner
    force: bool = False  # allow combinations known to collapse, for comparison
    loss: LossConfig = LossConfig()
    critic: CriticConfig = CriticConfig()  # used only by ppo
    dapo: DapoConfig = DapoConfig()
    filters: Annotated[tuple[FilterConfig, ...], Strict(False)] = ()
    train: TrainConfig = TrainConfig()
    stages: Annotated[tuple[StageConfig, ...], Strict(False)] = ()  # changes during the run
    noise: NoiseConfig | None = None
    score: ScoreConfig = ScoreConfig()
    buffer: BufferConfig = BufferConfig()  # selection of prompts
    guard: GuardConfig | None = GuardConfig()
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

    @property
    def num_groups(self) -> int:
        return self.batch_size // self.rollouts_per_example

    @property
    def has_critic(self) -> bool:
        return ALGORITHMS[self.algorithm].has_critic

    @property
    def samples_dynamically(self) -> bool:
        setting = self.dapo.dynamic_sampling
        return ALGORITHMS[self.algorithm].dynamic_sampling if setting is None else setting

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank holds a shard of the learner; by default where all weights
        learn."""
        setting = self.train.sharding
        return self.train.gpus > 1 and (
            setting == "full" or (setting == "auto" and not self.train.lora)
        )

    @property
    def forward(self) -> str:
        """Return the learner's forward; with exact rollouts it multiplies as they do."""
        if not self.rollout.exact:
            return self.train.forward
        return "dense" if is_dense(self.rollout.weights) else "aligned"

    @property
    def forward_weights(self) -> str | None:
        """Return the format of the learner's forward; None: its own weights."""
        forward = self.forward
        if forward == "dense":
            return None
        return self.rollout.weights if forward == "aligned" else forward

    def at(self, step: int) -> Self:
        """Return the settings of a step (counted from 1)."""
        cfg = self
        for stage in self.stages:
            cfg = cfg.entering(stage) if stage.step <= step else cfg
        return cfg

    def each_stage(self) -> list[Self]:
        """Return the initial settings, and those of every later stage."""
        return [self, *(self.at(stage.step) for stage in self.stages)]

    def entering(self, stage: StageConfig) -> Self:
        """Return the settings with a stage's changes."""
        updates: dict[str, Any] = {}
        for section, values in stage.changes().items():
            updates |= (
                {section: getattr(self, section).model_copy(update=values)} if section else values
            )
        return self.model_copy(update=updates)
