"""The checks of `--dry-run`, which find in seconds what would end a run before its first step.

Nothing is written. A few of the environments' own answers are scored in a real worker. Of models
only configuration, tokenizer and headers are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lowroll.config import EnvConfig, RunConfig
from lowroll.config.process_checks import one_process_notes, one_process_problems
from lowroll.envs import Environment, child
from lowroll.kv.capacity import Workload
from lowroll.metrics import trackers
from lowroll.model import exact, lora, size_checks
from lowroll.model.folder import resolve
from lowroll.model.headers import read_headers
from lowroll.model.spec import read_spec
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.orchestrator.groups import for_scorer
from lowroll.quant.format_budget import is_budget
from lowroll.quant.table import EIGHT_BITS, STORED
from lowroll.runs import chosen_formats, format_search, hub, sft
from lowroll.runs.assembly import (
    engines,
    environments,
    models,
    orchestrator,
    prompts,
    trainer,
)
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.folder import RunFolder
from lowroll.runs.memory import fit, sizes
from lowroll.runs.memory.plan import MemoryPlan, Planner, Share, plan_sft
from lowroll.runs.roles import devices
from lowroll.runs.roles.limits import refuse
from lowroll.trainer import adamw8bit
from lowroll.trainer.sft import encode_all
from lowroll.types import Prompt, Score, ScoreError

T = TypeVar("T")
ANSWERS = 8  # scored for each environment


@dataclass
class Findings:
    """The results of the checks: lines of the plan, notes, and problems that would end the run."""

    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def attempt(self, look: Callable[[], T]) -> T | None:
        """Return the result of a check; None when it found a problem."""
        try:
            return look()
        except (ValueError, OSError) as error:
            new_problems = (line for line in str(error).splitlines() if line not in self.problems)
            self.problems.extend(new_problems)
            return None


def look_at_run(cfg: RunConfig, resume: bool = False, overwrite: bool = False) -> Findings:
    """Check a run of `lowroll grpo`."""
    findings = Findings()
    cfg = _with_formats(cfg.resolved(), findings)
    findings.attempt(lambda: trackers.check(cfg.track))
    findings.attempt(lambda: hub.check(cfg.push_to_hub))
    findings.attempt(lambda: RunFolder(cfg, "grpo").check(resume, overwrite))
    placement = _place(cfg, findings)
    compute = findings.attempt(lambda: Compute.of(cfg))
    model = findings.attempt(lambda: _learner(cfg, compute, findings)) if compute else None
    chat = findings.attempt(lambda: models.chat_of(cfg)) if model else None
    findings.attempt(lambda: engines.check(cfg))
    findings.attempt(lambda: child.check_count(cfg.score.workers))
    envs = _environments(cfg, cfg.env, findings)
    held_out = _environments(cfg, cfg.eval.env, findings) if cfg.eval.env else envs
    findings.attempt(lambda: _check_settings(cfg))
    if model is not None:
        findings.attempt(
            lambda: orchestrator.settings(cfg, model.spec, own=orchestrator.estimator(cfg))
        )
        findings.attempt(lambda: prompts.check_stages(cfg, model.spec))
    for env in envs.values():
        _ask(env, cfg, findings, chat)
    if cfg.eval.interval:
        for env in held_out.values():
            findings.attempt(lambda env=env: prompts.check_tests(env))  # type: ignore[misc]
    if compute is None or model is None or chat is None or findings.problems:
        return findings
    skipped = findings.attempt(lambda: _describe_skipped_prompts(cfg, model, chat, envs, held_out))
    findings.notes += skipped or []
    other_models = findings.attempt(lambda: _outline_other_models(cfg, compute, model, chat))
    workloads = findings.attempt(lambda: _workloads(cfg, model, chat, envs, held_out))
    if cfg.rollout.engine != "native":
        findings.lines.append(_vllm_memory(cfg, compute))
    if other_models is not None and workloads is not None and placement is not None:
        planner = Planner.now(compute, model, workloads, other_models, share_of(cfg, placement))
        _plan_memory(findings, planner, cfg)
    return findings


def _place(cfg: RunConfig, found: Findings) -> devices.Placement | None:
    if cfg.launcher == "none":
        found.problems += one_process_problems(cfg)
        found.notes += one_process_notes(cfg)
        return devices.Placement()
    found.attempt(lambda: refuse(cfg))
    placement = found.attempt(lambda: devices.of_run(cfg))
    if placement is not None:
        found.lines.append(placement.line())
    return placement


def _with_formats(cfg: RunConfig, found: Findings) -> RunConfig:
    weights = cfg.rollout.weights
    if cfg.launcher != "none" or not (weights == STORED or is_budget(weights)):
        return cfg
    if weights == STORED:
        stored_format = found.attempt(lambda: chosen_formats.stored(cfg, Compute.of(cfg).dtype))
        return chosen_formats.with_weights(cfg, stored_format or EIGHT_BITS)
    found.attempt(lambda: format_search.refuse_model(cfg))
    found.notes.append(
        f"rollout.weights: {cfg.rollout.weights}: the formats are searched for when the run starts; "
        f"the memory is that of {EIGHT_BITS}"
    )
    return chosen_formats.with_weights(cfg, EIGHT_BITS)


def _plan_memory(found: Findings, planner: Planner, cfg: RunConfig) -> None:
    sized_cfg = cfg
    if cfg.launcher == "none":  # roles take the plain sizes
        sized_cfg = found.attempt(lambda: sizes.chosen(planner, cfg)) or cfg
    found.notes += [note for note in sized_cfg.notes if note not in cfg.notes]
    plan = found.attempt(lambda: planner.plan(sized_cfg))
    if plan is not None:
        _add_memory(found, plan, lambda: fit.advice(planner, sized_cfg))


def share_of(cfg: RunConfig, placed: devices.Placement) -> Share:
    """Return the part of the run on a learner rank's GPU."""
    return Share(cfg.train.gpus if cfg.is_sharded else 1, placed.shares if placed.ranks else 1)


def look_at_sft(cfg: RunConfig, resume: bool = False, overwrite: bool = False) -> Findings:
    cfg = sft.plain(cfg.resolved())
    findings = Findings()
    findings.attempt(lambda: sft.refuse_ranks(cfg))
    findings.attempt(lambda: RunFolder(cfg, "sft").check(resume, overwrite))
    compute = findings.attempt(lambda: Compute.of(cfg))
    if compute is not None:
        cfg = (
            findings.attempt(lambda: chosen_formats.settled(cfg, Path(cfg.output_dir), compute))
            or cfg
        )
    model = findings.attempt(lambda: _learner(cfg, compute, findings)) if compute else None
    chat = findings.attempt(lambda: models.chat_of(cfg)) if model else None
    findings.attempt(lambda: _check_settings(cfg))
    examples = findings.attempt(lambda: sft.examples(cfg))
    if compute is None or model is None or chat is None or examples is None:
        return findings
    samples = findings.attempt(
        lambda: encode_all(chat, examples, model.spec.vocab_size, model.spec.max_position)
    )
    if samples is not None:
        lengths = [len(sample.prompt_ids) + len(sample.rollout.token_ids) for sample in samples]
        findings.lines.append(
            f"{len(samples):,} demonstrations of {sum(lengths) / len(lengths):,.0f} tokens on "
            f"average, {max(lengths):,} at most; {cfg.sft.steps} steps of {cfg.sft.batch_size} at "
            f"learning rate {cfg.sft.learning_rate:g}"
        )
        batch_tokens = max(lengths) * cfg.sft.batch_size
        sized_cfg = sizes.chosen_for_sft(cfg, compute, model, max(lengths), batch_tokens)
        findings.notes += [note for note in sized_cfg.notes if note not in cfg.notes]
        _add_memory(findings, plan_sft(sized_cfg, compute, model, batch_tokens))
    return findings


def _learner(cfg: RunConfig, compute: Compute, found: Findings) -> Transformer:
    models.refuse_adapter("model", cfg.model)
    model = _outline("model", cfg.model, compute, found)
    models.refuse_backward(cfg, compute, model.spec)
    models.refuse_sharing(cfg, compute, model.spec)
    models.refuse_scale(cfg)
    engines.refuse(cfg, model.spec)
    if cfg.rollout.exact:
        exact.refuse(model.spec, compute.device, compute.dtype)
    if cfg.train.lora:
        lora.check(
            model.spec, cfg.train.lora_rank, cfg.train.lora_alpha, cfg.train.lora_target_modules
        )
    return model


def _outline(key: str, source: str, compute: Compute, found: Findings) -> Transformer:
    folder = resolve(source, weights=False, key=key)
    if Path(source).expanduser().is_dir():
        spec, _, _ = read_headers(folder)
    else:
        spec = read_spec(folder)
        size_checks.check_memory(
            folder / "config.json", spec, size_checks.LEAST_BITS, compute.device
        )
        found.notes.append(f"{key}: {source} is a hub id; its weights are not looked at")
    size_checks.check_heads(folder / "config.json", spec, compute.device)
    return Transformer(spec, "meta", compute.dtype)


def _environments(
    cfg: RunConfig, wanted: tuple[EnvConfig, ...], found: Findings
) -> dict[str, Environment]:
    envs: dict[str, Environment] = {}
    for env in wanted:
        envs |= found.attempt(lambda env=env: environments.make((env,), cfg.seed)) or {}  # type: ignore[misc]
    return envs


def _ask(
    env: Environment,
    cfg: RunConfig,
    found: Findings,
    chat: ChatTokenizer | None,
) -> None:
    try:
        size = env.size("train")
        count = ANSWERS if size is None else min(ANSWERS, size)
        prompts = [env.prompt(index) for index in range(count)]
    except Exception as error:  # an environment's code may raise anything
        found.problems.append(
            f"env {env.name!r}: no prompt could be drawn ({type(error).__name__}: {error})"
        )
        return
    if not prompts:
        found.problems.append(f"env {env.name!r}: its train split has no task")
        return
    try:
        responses = [(prompt, env.gold(prompt)) for prompt in prompts]
        answers = "of its own answers"
    except Exception as error:  # the run never uses own answers, so this is only a note
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        found.notes.append(
            f"env {env.name!r}: it gives no answer of its own, so its scorer was tried on the "
            f"prompts alone ({reason})"
        )
        responses = [(prompt, "some text") for prompt in prompts]
        answers = ""
    results = _score_by_worker(env, cfg, responses, found, chat)
    errors = [result for result in results if isinstance(result, ScoreError) and result.failed]
    if errors:
        failure = (
            f"env {env.name!r}: its scorer fails on {len(errors)} of {len(results)} "
            f"{answers or 'responses'} ({errors[0].kind}: {errors[0].message})"
        )
        if answers and len(errors) > cfg.score.max_error_rate * len(results):
            found.problems.append(failure)
        elif not answers:  # of arbitrary text only a wrong type is the scorer's fault
            has_wrong_type = any(error.kind == "invalid" for error in errors)
            (found.problems if has_wrong_type else found.notes).append(failure)
    rejected = sum(not isinstance(result, ScoreError) and result.reward < 1 for result in results)
    if answers and rejected:
        found.notes.append(
            f"env {env.name!r}: {rejected} of {len(results)} of its own answers score below 1 "
            "(lowroll.envs.make(...).validate() shows them)"
        )


def _score_by_worker(
    env: Environment,
    cfg: RunConfig,
    responses: list[tuple[Prompt, str]],
    found: Findings,
    chat: ChatTokenizer | None,
) -> list[Score | ScoreError]:
    env_configs = tuple(env_config for env_config in cfg.env if env_config.name == env.name)
    one_worker_cfg = cfg.model_copy(update={"score": cfg.score.model_copy(update={"workers": 1})})
    tasks = [(_prompt_for_scorer(prompt, text, cfg, chat), text) for prompt, text in responses]
    try:
        with environments.scorer(one_worker_cfg, env_configs) as pool:
            return list(pool.score(tasks))
    except RuntimeError as error:  # no worker could build the environment
        found.problems.append(f"env {env.name!r}: {error}")
        return []


def _prompt_for_scorer(
    prompt: Prompt, text: str, cfg: RunConfig, chat: ChatTokenizer | None
) -> Prompt:
    if chat is None:  # reported separately
        return prompt
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    return for_scorer(prompt, [ids], 1, cfg.train.max_steps)


def _vllm_memory(cfg: RunConfig, compute: Compute) -> str:
    vllm = cfg.rollout.vllm
    description = f"rollouts by {vllm.words}, whose memory is its own"
    if vllm.url is None and compute.device.type == "cuda":
        description += f": {vllm.gpu_memory_utilization:.0%} of each of its GPUs"
    return description


def _check_settings(cfg: RunConfig) -> None:
    for build in (trainer.learn, trainer.optim, trainer.guard, trainer.noise):
        build(cfg)
    if cfg.train.optimizer == "adamw8bit":
        adamw8bit.find()


def _outline_other_models(
    cfg: RunConfig, compute: Compute, model: Transformer, chat: ChatTokenizer
) -> dict[str, Transformer]:
    outlines, ignored_findings = {}, Findings()
    for name, (key, source) in models.beside(cfg).items():
        if key == "model":
            outlines[name] = model
            continue
        if name == "critic":
            models.refuse_adapter(key, source)
        models.refuse_other_vocabulary(key, source, cfg, chat)
        outlines[name] = _outline(key, source, compute, ignored_findings)
    return outlines


def _describe_skipped_prompts(
    cfg: RunConfig,
    model: Transformer,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    held_out: Mapping[str, Environment],
) -> list[str]:
    lines = prompts.passed_over(cfg, model.spec, chat, envs)
    if cfg.eval.interval:
        lines += prompts.passed_over(cfg, model.spec, chat, held_out, "test")
    return lines


def _workloads(
    cfg: RunConfig,
    model: Transformer,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    held_out: Mapping[str, Environment],
) -> list[Workload]:
    prompts.check(cfg, model.spec, chat, envs)
    prompts.check_held_out(cfg, model.spec, chat, held_out)
    return engines.workloads(
        engines.with_rollout(cfg, cache_tokens=None), model.spec, chat, envs, held_out
    )


def _add_memory(found: Findings, plan: MemoryPlan, advice: Callable[[], str] | None = None) -> None:
    found.lines += plan.lines()
    if plan.missing:
        found.problems.append(f"{plan.problem}; {advice()}" if advice else plan.problem)
