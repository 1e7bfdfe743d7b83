"""The environments of a run and their scoring workers. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from lowroll import envs
from lowroll.config import EnvConfig, RunConfig
from lowroll.envs import Environment, child
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.envs.worker_output import readable


def make(wanted: tuple[EnvConfig, ...], seed: int) -> dict[str, Environment]:
    """Make the environments. ValueError for a shared name, or an unset variable of `pass_env`."""
    env_secrets = [
        child.named(env.pass_env, f"env {env.name or env.id!r}: pass_env") for env in wanted
    ]
    instances = [
        _make_environment(env, seed, secrets)
        for env, secrets in zip(wanted, env_secrets, strict=True)
    ]
    names = [env.name for env in instances]
    if len(set(names)) < len(names):
        raise ValueError(
            f"env: two environments are named {max(names, key=names.count)!r}; give each a name"
        )
    return dict(zip(names, instances, strict=True))


def _make_environment(env: EnvConfig, seed: int, secrets: Mapping[str, str]) -> Environment:
    try:
        return envs.make(env.id, name=env.name, args=env.args, seed=seed)
    except ValueError as error:
        raise ValueError(readable(str(error), secrets)) from (None if secrets else error)


def scorer(cfg: RunConfig, wanted: tuple[EnvConfig, ...]) -> ScorerPool:
    specs = {env.name or env.id: (env.id, dict(env.args), cfg.seed) for env in wanted}
    variables = sorted({name for env in wanted for name in env.pass_env})
    return ScorerPool(
        specs, cfg.score.workers, cfg.score.time_limit, cfg.score.memory_limit_mb, variables
    )
