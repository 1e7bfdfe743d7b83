"""The check that an engine can do what a run needs. No torch."""

from __future__ import annotations

from lowroll.config import RunConfig
from lowroll.engine.base import Capabilities
from lowroll.orchestrator.settings import SamplingSettings
from lowroll.runs.assembly import orchestrator


def check(cfg: RunConfig, able: Capabilities) -> None:
    """Raise ValueError naming the unsupported settings."""
    requested = vars(orchestrator.sampling(cfg))
    defaults = vars(SamplingSettings())
    changed = [name for name, value in requested.items() if value != defaults[name]]
    unsupported = [name for name in changed if name not in able.sampler]
    if unsupported:
        raise ValueError(f"rollout: this engine does not heed {', '.join(unsupported)}")
    if not able.exact_logprobs:
        raise ValueError(
            "rollout: this engine's log-probs are not those of the distribution that it draws from"
        )
    if cfg.noise is not None and not able.noise:
        raise ValueError("noise: this engine puts none on its norms")
    kv = cfg.rollout.cache
    for key, required, offered in (
        ("policy", kv.policy, able.kv_policy),
        ("dtype", kv.dtype, able.kv_dtype or "auto"),
    ):
        if required != offered:
            raise ValueError(
                f"rollout.kv.{key}: {required} is asked for; this engine's is {offered}"
            )
    partial = cfg.asynchrony.partial
    is_able = {"replay": able.replays, "keep": able.updates_in_flight}
    if not is_able.get(partial, True):
        raise ValueError(f"asynchrony.partial: this engine cannot {partial} what is in flight")
    if cfg.train.replay_kv and kv.evicts and not able.records_evictions:
        raise ValueError("train.replay_kv: this engine does not say which keys its cache drops")
