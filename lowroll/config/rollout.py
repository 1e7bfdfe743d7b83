"""The sections `rollout:` and `noise:`.

    rollout.weights: {max_kl: 0.02}       a budget, under which each layer gets a format
    rollout.weights: max_kl=0.02          the same for the command line
    rollout.kv: {policy: rkv, budget: 512, buffer: 128}

A budget is kept as text (`quant.format_budget`). Other keys of `rollout.kv` are the policy's
options (`lowroll.kv.policy.table`).
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
from lowroll.quant import format_budget
from lowroll.quant.format_budget import Budget, is_budget
from lowroll.quant.table import DEFAULT, FORMATS, OWN, STORED, is_dense
from lowroll.types import nearest


class WeightBudget(Section):
    """Limits on the rollouts' linear weights; each layer gets a format."""

    max_kl: NotNegative | None = None  # KL of the dense model to them, nats a token
    max_bits: Positive | None = None  # mean bits a weight over the linear layers, with scales
    max_bytes: Count | None = None  # of all linear layers, with scales
    # allowed formats, the smallest valid one first; null: 4, 8 and 16 bits
    formats: Annotated[tuple[str, ...], Strict(False), Field(min_length=1)] | None = None

    @property
    def budget(self) -> Budget:
        return Budget(self.max_kl, self.max_bits, self.max_bytes, self.formats or ())

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, problem in self.budget.problems():
            raise PydanticCustomError("budget", "{text}", {"text": f"{key}: {problem}"})
        return self


class FormatOrBudget:
    """A validator that keeps a format's name or a budget as text."""

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
        return str(format_budget.parse(value))
    except ValueError as error:
        raise PydanticCustomError("budget", "{text}", {"text": str(error)}) from None


Weights = Annotated[str, FormatOrBudget()]


Policy = Annotated[str, one_of(lambda: POLICIES)]


Dtype = Literal["auto", "fp8"]


class KvConfig(Section):
    """The KV cache of the rollouts, by default the dense one."""

    model_config = ConfigDict(extra="allow")  # the policy's options

    policy: Policy = "dense"  # which keys stay; its options are further keys: docs/usage.md
    # auto: the engine's own dtype; fp8: keys and values in 8 bits
    dtype: Dtype = "auto"

    @classmethod
    def table_keys(cls) -> list[str]:
        return list(dict.fromkeys(option for row in POLICIES.values() for option in row.options))

    @property
    def options(self) -> dict[str, Any]:
        policy_options = POLICIES[self.policy].options
        extra_options = self.model_extra or {}
        return {
            name: value
            for name, value in extra_options.items()
            if value is not None or name not in policy_options
        }

    @property
    def kv_dtype(self) -> str | None:
        return None if self.dtype == "auto" else self.dtype

    @property
    def name(self) -> str:
        return self.policy if self.dtype == "auto" else f"{self.policy}+{self.dtype}"

    @property
    def evicts(self) -> bool:
        return self.policy != "dense"

    def resolved(self) -> KvConfig:
        """Return a copy with the policy's defaults filled in."""
        return KvConfig(policy=self.policy, dtype=self.dtype, **filled(self.policy, self.options))

    def another(self, name: str) -> KvConfig:
        """Return the cache of a `lowroll eval --kv` name, with this one's options for its policy.
        ValueError lists the names."""
        name_parts = name.split("+")
        policy = name_parts[0] if name_parts[0] in POLICIES else "dense"
        dtype: Dtype = "fp8" if name_parts[-1] == "fp8" else "auto"
        if name not in (policy, "fp8", f"{policy}+fp8"):
            raise ValueError(
                f"--kv: unknown cache {name!r}; known: {', '.join(POLICIES)}, and fp8 or "
                "<policy>+fp8 for one in 8 bits"
            )
        policy_options = POLICIES[policy].options
        options = {key: value for key, value in self.options.items() if key in policy_options}
        for option, problem in problems(policy, options):
            raise ValueError(f"rollout.kv.{option}: {problem}")
        return KvConfig(policy=policy, dtype=dtype, **filled(policy, options))


def kv_problems(kv: KvConfig | None) -> Iterator[Problem]:
    """Yield unknown options of the policy and invalid values."""
    if kv is None:
        return
    policy_options = POLICIES[kv.policy].options
    for option, problem in problems(kv.policy, kv.options):
        if option not in policy_options:
            problem += nearest(
                option, [*KvConfig.model_fields, *policy_options]
            ) or _bounded_policies_hint(kv.policy)
        key_path: Path = ("rollout", "kv", option)
        yield (key_path,), problem


def _bounded_policies_hint(policy: str) -> str:
    policies_with_options = [name for name, row in POLICIES.items() if row.options]
    return (
        "" if POLICIES[policy].options else f"; name a policy: {', '.join(policies_with_options)}"
    )


class TemperatureConfig(Section):
    """A sampling temperature that moves from start to end over the run."""

    type: Literal["linear", "cosine"]  # its course
    start_temperature: Temperature  # of the first step
    end_temperature: Temperature  # of the last step


EngineName = Literal["native", "vllm"]


class RolloutConfig(Section):
    """The engine and its sampling."""

    engine: EngineName = "native"  # lowroll's own, or vLLM
    vllm: VllmConfig = VllmConfig()  # used only by engine: vllm
    engines: Count = 1  # engines of a run with roles, each a process (on its own GPU)
    # format of the linear weights, or a budget (max_kl, max_bits, max_bytes, formats) under which
    # each layer gets one; dense: the run's dtype; stored: the codes in the model's folder
    weights: Weights = DEFAULT
    # true: a token's recorded log-prob is, bit for bit, what the learner computes before its
    # update. The learner then multiplies in the rollouts' formats (train.forward: aligned), on a
    # CPU in float32. null: where supported, on a CPU the engine and an aligned learner, on a GPU
    # both if LoRA learns aligned on INT8 codes; false: neither
    exact: bool | None = None
    kv: KvConfig | None = None  # null: every key, in the engine's own dtype
    max_tokens: Count = 64  # tokens of the longest response
    min_tokens: Whole = 0  # tokens of the shortest response
    temperature: Temperature = 1.0  # of the sampler
    temp_scheduler: TemperatureConfig | None = None  # replaces `temperature`
    top_p: Probability = 1.0  # the likeliest tokens that together have this probability
    top_k: Whole = 0  # 0 is off
    # tokens with this share of the likeliest one's probability
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: Penalty = 1.0  # on tokens already in the text; 1 is off
    stop: Annotated[tuple[Text, ...], Strict(False)] = ()  # stop strings
    # format of tool calls; null: as in the chat template
    tool_call_parser: ToolFormat | None = None
    page_size: Count = 16  # tokens in a page of the KV cache
    max_batch: Count = 256  # sequences decoded together
    # a second format, used while many rows decode
    large_batch_weights: LargeBatchWeights | None = None
    keep_dense: bool = False  # 4 bits on CUDA: additional dense weights for many rows
    release_cache: bool = False  # give the cache's memory to the learner between rollouts
    cache_tokens: Count | None = None  # capacity of the KV cache in tokens; null: what the run uses
    prefill_chunk: Count | None = None  # prompt tokens of a sequence in one step; null: all
    # tokens of a prompt and its response; longer prompts are skipped. null: what a micro-batch and
    # the model's context hold
    max_model_len: Count | None = None
    seed: Seed | None = None  # of sampling; null: the run's
    cuda_graphs: bool = True  # false: launch kernels one by one, for debugging
    prefix_caching: bool = True  # reuse a prompt's pages for prompts with the same beginning
    # reuse pages of drawn tokens too: a conversation's next turn only runs its new tokens, and its
    # log-probs differ in the last bits
    turn_caching: bool = False
    # share of the GPU's memory for weights and cache; null: what the run can use
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None

    @property
    def cache(self) -> KvConfig:
        return self.kv or KvConfig()

    def with_kv(self, kv: KvConfig | None) -> RolloutConfig:
        return self if kv == self.kv else self.model_copy(update={"kv": kv})


class NoiseConfig(Section):
    """QeRL's noise on the norms of the rollout engine: sigma falls over the run, in stages."""

    sigma_start: NotNegative = 1e-2  # standard deviation of the first stage with noise
    sigma_end: NotNegative = 1e-4  # and of the last
    num_stages: Count = 10  # stages of the run
    # its course between them
    schedule: Literal["exponential", "linear", "cosine", "logarithmic"] = "exponential"
    # whether num_stages counts the silent first stage (code) or not
    variant: Literal["code", "paper"] = "code"
    # shared: the learner's norms carry the same noise
    learner: Literal["clean", "shared"] = "clean"


def noise_problems(noise: NoiseConfig | None) -> Iterator[Problem]:
    """Yield an exponential schedule that starts or ends at 0."""
    if (
        noise is not None
        and noise.schedule == "exponential"
        and ((noise.sigma_start > 0) != (noise.sigma_end > 0))
    ):
        yield (
            (("noise", "sigma_end"), ("noise", "sigma_start")),
            "an exponential never reaches or leaves 0; set both sigmas above 0, or another noise.schedule",
        )
