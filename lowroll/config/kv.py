"""The `rollout.kv:` section: which keys the rollouts' cache keeps, and in what it holds them.

    rollout.kv: {policy: rkv, budget: 512, buffer: 128}
    rollout.kv: {dtype: fp8}

The keys beside `policy` and `dtype` are the policy's own options. Their names, defaults and bounds
are those of its row in `lowroll.kv.policy.table`; one that is left out, or null, has its default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict

from lowroll.config.document import Path
from lowroll.config.section import Problem, Section, one_of
from lowroll.kv.policy.table import POLICIES, filled, problems
from lowroll.types import nearest

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
