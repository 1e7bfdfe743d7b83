"""The `rollout:` section, with those inside it, and `noise:`: the engine, its weights, cache and sampler.

    rollout.weights: int8
    rollout.weights: stored               the codes that the folder of the model holds, one format or several
    rollout.weights: {max_kl: 0.02}       a budget, under which each layer gets a format
    rollout.weights: max_kl=0.02          the same in one word, as the command line has it
    rollout.kv: {policy: rkv, budget: 512, buffer: 128}
    rollout.kv: {dtype: fp8}

A budget is kept as its text (`quant.budget`), in which it travels like a name. The keys of `rollout.kv` beside
`policy` and `dtype` are the policy's own options. Their names, defaults and bounds are those of its row in
`lowroll.kv.policy.table`; one that is left out, or null, has its default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, Strict, model_validator
from pydantic_core import PydanticCustomError, core_schema

from lowroll.config.document import Path
from lowroll.config.section import (
    Count,
    LargeBatchWeights,
    NotNegative,
    Penalty,
    Positive,
    Probability,
    Problem,
    Section,
    Seed,
    Temperature,
    Text,
    ToolFormat,
    Whole,
    known,
    one_of,
)
from lowroll.config.vllm import VllmConfig
from lowroll.kv.policy.table import POLICIES, filled, problems
from lowroll.quant import budget
from lowroll.quant.budget import Budget, is_budget
from lowroll.quant.table import DEFAULT, FORMATS, OWN, STORED, is_dense
from lowroll.types import nearest


class WeightBudget(Section):
    """The limits on the linear weights of the rollouts; each layer gets a format."""

    max_kl: NotNegative | None = None  # of the dense model to them, in nats a token, measured
    max_bits: Positive | None = None  # a weight, with scales; the mean over the linear layers
    max_bytes: Count | None = None  # of all linear layers, with scales
    # that layers may have, the smallest that a layer can hold first; null: 4, 8 and 16 bits
    formats: Annotated[tuple[str, ...], Strict(False), Field(min_length=1)] | None = None

    @property
    def budget(self) -> Budget:
        return Budget(self.max_kl, self.max_bits, self.max_bytes, self.formats or ())

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, why in self.budget.problems():
            raise PydanticCustomError("budget", "{text}", {"text": f"{key}: {why}"})
        return self


class FormatOrBudget:
    """A validator of a format's name or a budget; the value is text."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        section = core_schema.no_info_after_validator_function(
            lambda found: str(found.budget), handler.generate_schema(WeightBudget)
        )
        return core_schema.no_info_wrap_validator_function(
            _check, section, serialization=core_schema.to_string_ser_schema()
        )


def _check(value: Any, as_section: core_schema.ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, dict | WeightBudget):
        return as_section(value)
    if not is_budget(value):
        return known(value, sorted((OWN, *FORMATS, STORED), key=is_dense))
    try:
        return str(budget.parse(value))
    except ValueError as error:
        raise PydanticCustomError("budget", "{text}", {"text": str(error)}) from None


Weights = Annotated[str, FormatOrBudget()]


Policy = Annotated[str, one_of(lambda: POLICIES)]


Dtype = Literal["auto", "fp8"]


class KvConfig(Section):
    """The KV cache of the rollouts; without any key it is the dense one."""

    model_config = ConfigDict(extra="allow")  # the policy's options

    policy: Policy = "dense"  # which keys stay; its options are keys beside it: docs/usage.md
    # auto: the engine's own dtype; fp8: keys and values in 8 bits
    dtype: Dtype = "auto"

    @classmethod
    def table_keys(cls) -> list[str]:
        return list(dict.fromkeys(option for row in POLICIES.values() for option in row.options))

    @property
    def options(self) -> dict[str, Any]:
        """The options that were given."""
        known = POLICIES[self.policy].options
        given = self.model_extra or {}
        return {name: v for name, v in given.items() if v is not None or name not in known}

    @property
    def kv_dtype(self) -> str | None:
        """`dtype` as an engine takes it and a `BehaviorTag` has it: None is the engine's own."""
        return None if self.dtype == "auto" else self.dtype

    @property
    def name(self) -> str:
        """ "rkv", "dense+fp8"."""
        return self.policy if self.dtype == "auto" else f"{self.policy}+{self.dtype}"

    @property
    def evicts(self) -> bool:
        """Return whether a rollout's cache may lose keys."""
        return self.policy != "dense"

    def resolved(self) -> KvConfig:
        """Return a copy with the policy's defaults filled in."""
        return KvConfig(policy=self.policy, dtype=self.dtype, **filled(self.policy, self.options))

    def another(self, name: str) -> KvConfig:
        """The cache that a name of `lowroll eval --kv` stands for, with the options of this one
        that its policy has.

        ValueError says which names there are.
        """
        words = name.split("+")
        policy = words[0] if words[0] in POLICIES else "dense"
        dtype: Dtype = "fp8" if words[-1] == "fp8" else "auto"
        if name not in (policy, "fp8", f"{policy}+fp8"):
            raise ValueError(
                f"--kv: unknown cache {name!r}; known: {', '.join(POLICIES)}, and fp8 or "
                "<policy>+fp8 for one in 8 bits"
            )
        known = POLICIES[policy].options
        options = {key: value for key, value in self.options.items() if key in known}
        for option, problem in problems(policy, options):
            raise ValueError(f"rollout.kv.{option}: {problem}")
        return KvConfig(policy=policy, dtype=dtype, **filled(policy, options))


def kv_problems(kv: KvConfig | None) -> Iterator[Problem]:
    """Options that the policy has not, or not with such values."""
    if kv is None:
        return
    known = POLICIES[kv.policy].options
    for option, problem in problems(kv.policy, kv.options):
        if option not in known:
            problem += nearest(option, [*KvConfig.model_fields, *known]) or _bounded(kv.policy)
        where: Path = ("rollout", "kv", option)
        yield (where,), problem


def _bounded(policy: str) -> str:
    others = [name for name, row in POLICIES.items() if row.options]
    return "" if POLICIES[policy].options else f"; name a policy: {', '.join(others)}"


class TemperatureConfig(Section):
    """A sampling temperature that moves from start to end over the run."""

    type: Literal["linear", "cosine"]  # its course
    start_temperature: Temperature  # of the first step
    end_temperature: Temperature  # of the last step


EngineName = Literal["native", "vllm"]


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
    min_tokens: Whole = 0  # a response's shortest length, in tokens
    temperature: Temperature = 1.0  # of the sampler
    temp_scheduler: TemperatureConfig | None = None  # takes the place of `temperature`
    top_p: Probability = 1.0  # the likeliest tokens that together have this probability
    top_k: Whole = 0  # 0 is off
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
    seed: Seed | None = None  # of what is drawn; null: the run's
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


class NoiseConfig(Section):
    """QeRL's noise on the norms of the rollout engine: sigma falls from start to end over the run,
    in stages."""

    sigma_start: NotNegative = 1e-2  # standard deviation of the first stage with noise
    sigma_end: NotNegative = 1e-4  # and of the last
    num_stages: Count = 10  # stages of the run
    # its course between them
    schedule: Literal["exponential", "linear", "cosine", "logarithmic"] = "exponential"
    # num_stages counts the silent first stage, or does not
    variant: Literal["code", "paper"] = "code"
    # shared: the learner's norms carry the same noise
    learner: Literal["clean", "shared"] = "clean"


def noise_problems(noise: NoiseConfig | None) -> Iterator[Problem]:
    """Yield the problem of a schedule that cannot begin or end where it should."""
    if (
        noise is not None
        and noise.schedule == "exponential"
        and ((noise.sigma_start > 0) != (noise.sigma_end > 0))
    ):
        yield (
            (("noise", "sigma_end"), ("noise", "sigma_start")),
            "an exponential never reaches or leaves 0; set both sigmas above 0, or another noise.schedule",
        )
