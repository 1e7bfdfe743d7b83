"""`lowroll eval`: a model in several formats and caches, or a server, on held-out prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from lowroll.checkpoint.lock import RunLock
from lowroll.config import RunConfig
from lowroll.config.data import EnvConfig, default_name
from lowroll.config.rollout import KvConfig
from lowroll.engine.base import Engine
from lowroll.envs import Environment
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.metrics.progress import phases
from lowroll.model import hf
from lowroll.model.folder import resolve
from lowroll.model.headers import exact_format
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.orchestrator import examples as responses_of
from lowroll.orchestrator.conversations import Conversations
from lowroll.orchestrator.errors import ScoringFailed
from lowroll.orchestrator.evaluate import check_errors, plan
from lowroll.orchestrator.examples import Example
from lowroll.orchestrator.interfaces import PhaseProgress
from lowroll.quant.table import OWN, STORED
from lowroll.runs import chosen_formats
from lowroll.runs.assembly import engines, environments, models, orchestrator, prompts
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.evaluation_log import Responses
from lowroll.runs.remote_model import Server
from lowroll.runs.results import EngineAnswers, folder_of, leave, rows_of
from lowroll.types import Score

Rows = list[dict[str, Any]]
log = logging.getLogger(__name__)


def evaluate(
    cfg: RunConfig,
    weights: Sequence[str] = (),
    kv: Sequence[KvConfig] = (),
    *,
    each: Mapping[str, int] | None = None,
    out: Path | None = None,
) -> Rows:
    """Return a row for each environment, format and cache (`results.rows_of`), and their averages.

    weights: formats or budgets, by default dense and rollout.weights or the model's own low-bit
    format. kv: by default dense and rollout.kv. All use the same prompts, seeds, last stage's
    lengths and cache size, which the first unbounded cache sets. each: responses to an example by
    environment. out: the folder of the results, from which a killed evaluation continues.
    """
    requested_weights = weights or ["dense", _rollouts(cfg)]
    cfg = engines.with_rollout(cfg.resolved().at(cfg.train.max_steps), engine="native")
    caches = _distinct_caches(kv or (cfg.rollout.cache.another("dense"), cfg.rollout.cache))
    compute = Compute.of(cfg)
    chat = models.chat_of(cfg)
    names_by_format: dict[str, str] = {}  # two names may mean one format
    for requested in requested_weights:
        name = chosen_formats.named(requested, cfg, compute, chat)
        names_by_format.setdefault(compute.format(name), name)
    model = hf.load(cfg.model, compute.device, compute.dtype)
    spec = model.spec
    env_configs = cfg.eval.env or cfg.env
    envs = environments.make(env_configs, cfg.seed)
    workloads = [engines.eval_workload(cfg, spec, chat, envs)]
    answers: list[EngineAnswers] = []
    known_warnings: set[str] = set()
    with environments.scorer(cfg, env_configs) as scorer, phases() as on_phase:
        for cache, (format, name) in product(caches, names_by_format.items()):
            cfg = _with_kv(cfg, cache)
            engine = engines.make(cfg, compute, model, chat, name, workloads)
            cfg = engines.with_rollout(cfg, cache_tokens=engine.stats().cache_tokens)
            for line in prompts.check(cfg, spec, chat, envs, "test"):
                if line not in known_warnings:
                    log.warning("%s", line)
                    known_warnings.add(line)
            # All engines get the prompts that fit the smallest cache.
            cache_cfgs = [_with_kv(cfg, kv_config) for kv_config in caches]
            limits = _TokenLimits(
                prompt=min(prompts.longest(cache_cfg, spec) for cache_cfg in cache_cfgs),
                sequence=min(prompts.sequence(cache_cfg, spec) for cache_cfg in cache_cfgs),
            )
            settings = {"cache": cache.resolved().model_dump(mode="json")}
            asker = _Asker(cfg, env_configs, envs, scorer, each or {}, out, on_phase, settings)
            answers += asker.ask(engine, chat, limits, {"weights": format, "kv": cache.name})
    return _make_rows(cfg, answers, out)


def _distinct_caches(caches: Sequence[KvConfig]) -> list[KvConfig]:
    by_name = {cache.name: cache for cache in caches}
    return sorted(by_name.values(), key=lambda cache: cache.evicts)


def evaluate_server(
    cfg: RunConfig,
    server: Server,
    *,
    each: Mapping[str, int] | None = None,
    out: Path | None = None,
) -> Rows:
    """Return the rows of a served model. ValueError when its context is too short."""
    cfg = cfg.resolved().at(cfg.train.max_steps)
    context = server.engine.capabilities.context_length
    max_prompt_tokens = context - cfg.rollout.max_tokens
    if max_prompt_tokens < 1:
        raise ValueError(
            f"rollout.max_tokens: {cfg.rollout.max_tokens} leaves no room for a prompt in the "
            f"context of {server.url}, {context} tokens"
        )
    env_configs = cfg.eval.env or cfg.env
    envs = environments.make(env_configs, cfg.seed)
    about = {"server": server.url, "model": server.model}
    with environments.scorer(cfg, env_configs) as scorer, phases() as on_phase:
        asker = _Asker(cfg, env_configs, envs, scorer, each or {}, out, on_phase)
        limits = _TokenLimits(max_prompt_tokens, context)
        return _make_rows(cfg, asker.ask(server.engine, server.chat, limits, about), out)


@contextmanager
def place(
    cfg: RunConfig, each: Mapping[str, int], given: Path | None, server: Server | None = None
) -> Iterator[Path]:
    """Lock and yield the folder of an evaluation."""
    if given is not None:
        folder = given
    elif server is not None:
        folder = folder_of(cfg, each, None, f"{server.url} {server.model}")
    else:
        folder = folder_of(cfg, each, resolve(cfg.model))
    with RunLock(folder):
        yield folder


class _TokenLimits(NamedTuple):
    prompt: int
    sequence: int  # a conversation with its prompt


@dataclass(frozen=True)
class _Asker:
    """An evaluation's requests for every engine."""

    cfg: RunConfig
    chosen: tuple[EnvConfig, ...]
    envs: Mapping[str, Environment]
    scorer: ScorerPool
    each: Mapping[str, int]
    out: Path | None
    on_phase: PhaseProgress
    held: Mapping[str, Any] = field(default_factory=dict)  # distinguishes engines

    def ask(
        self,
        engine: Engine,
        chat: ChatTokenizer,
        limits: _TokenLimits,
        about: Mapping[str, str],
    ) -> list[EngineAnswers]:
        """Return an engine's answers to every environment. about: the engine, in the rows' keys."""
        prompts.check_turns(chat, self.envs)
        return [self._ask(env, engine, chat, limits, about) for env in self.envs.values()]

    def _ask(
        self,
        env: Environment,
        engine: Engine,
        chat: ChatTokenizer,
        limits: _TokenLimits,
        about: Mapping[str, str],
    ) -> EngineAnswers:
        began = time.monotonic()
        n = self.each.get(env.name, self.cfg.eval.rollouts_per_example)
        num_examples = self.cfg.eval.count(env.size("test"))
        sampling = orchestrator.eval_sampling(self.cfg)
        draws = plan(
            env,
            chat,
            num_examples=num_examples,
            rollouts_per_example=n,
            sampling=sampling,
            seed=self.cfg.seed,
            max_prompt_tokens=limits.prompt,
            max_sequence_tokens=limits.sequence,
        )
        settings = {  # the file is refused for other ones
            "env": env.name,
            **self._environment(env.name),
            **about,
            **self.held,
            "n": n,
            "sampling": vars(sampling),
            "seed": self.cfg.seed,
            "policy": engine.behavior.policy[0].digest,
        }
        stored_responses = Responses(self._file(env.name, about), settings)
        label = f"{env.name}, {', '.join(about.values())}"
        on_draw = partial(self.on_phase, f"{label}: generate")
        conversations = Conversations(engine, self.scorer, chat)
        missing = stored_responses.missing(draws)
        responses_of.draw(missing, conversations, chat, stored_responses.keep_drawn, on_draw)
        examples = stored_responses.of(draws)
        self._score(env, examples, stored_responses, label)
        majority_right = None
        if n > 1:
            on_vote = partial(self.on_phase, f"{label}: vote")
            majority_right = responses_of.votes(examples, env, self.scorer, on_vote)
        return EngineAnswers(
            env.name,
            dict(about),
            examples,
            majority_right,
            seconds=time.monotonic() - began,
            left_out=num_examples - len(draws),
        )

    def _score(
        self, env: Environment, examples: Sequence[Example], kept: Responses, label: str
    ) -> None:
        unscored = [
            example
            for example in examples
            if any(response.score is None for response in example.responses)
        ]
        on_score = partial(self.on_phase, f"{label}: score")
        responses_of.score(unscored, self.scorer, kept.keep_scored, on_score)
        responses = [response for example in examples for response in example.responses]
        scores = [response.score for response in responses if response.score is not None]
        check_errors(scores, self.cfg.score.max_error_rate)
        if not any(isinstance(score, Score) for score in scores):
            raise ScoringFailed(
                f"env {env.name!r}: no reward function says anything of any response"
            )

    def _environment(self, name: str) -> dict[str, Any]:
        (env_config,) = (env for env in self.chosen if default_name(env) == name)
        return {"id": env_config.id, "args": dict(env_config.args)}

    def _file(self, env: str, about: Mapping[str, str]) -> Path | None:
        if self.out is None:
            return None
        engine_name = quote(",".join(about.values()), safe=",+")
        return self.out / "responses" / engine_name / f"{quote(env, safe='')}.jsonl"


def _make_rows(cfg: RunConfig, measured: Sequence[EngineAnswers], out: Path | None) -> Rows:
    rows = rows_of(measured, cfg.seed)
    if out is not None:
        leave(out, cfg, measured, rows)
    return rows


def _with_kv(cfg: RunConfig, kv: KvConfig) -> RunConfig:
    return cfg.model_copy(update={"rollout": cfg.rollout.with_kv(kv)})


def _rollouts(cfg: RunConfig) -> str:
    weights = cfg.rollout.weights
    if "weights" in cfg.rollout.model_fields_set and weights != STORED:
        return weights
    stored_format = exact_format(resolve(cfg.model), Compute.of(cfg).dtype)
    if stored_format is not None:
        return stored_format
    return OWN if weights == STORED else weights  # a dense model may replace the run's folder
