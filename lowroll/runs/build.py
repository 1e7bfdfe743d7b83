"""From a configuration to the parts of a run: model, engine, environments, scorer, settings of each
room.

Only this file, `lowroll.runs.grpo` and the commands know both the configuration and the rooms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lowroll.config import EnvConfig, RunConfig, as_config
from lowroll.engine.native import Engine, pick_device
from lowroll.envs import Environment, cells, child, make
from lowroll.envs.output import readable
from lowroll.envs.rewards import ScorerPool
from lowroll.envs.tasks import prompt_at
from lowroll.kv.capacity import Workload
from lowroll.model import hf, lora, scaling
from lowroll.model.tokenizer import ChatTokenizer, load_tokenizer
from lowroll.model.transformer import Transformer
from lowroll.objectives.objective import select
from lowroll.orchestrator.filters import Filter, Gibberish, Repetition
from lowroll.orchestrator.schedule import TemperatureSchedule
from lowroll.orchestrator.settings import Sampling, Settings
from lowroll.quant import dense
from lowroll.quant.formats import get_format
from lowroll.runs.folder import ENVIRONMENTS
from lowroll.trainer import recompute
from lowroll.trainer.critic import Critic, CriticSettings
from lowroll.trainer.guard import Guard, GuardSettings
from lowroll.trainer.optim import OptimSettings
from lowroll.trainer.step import LearnSettings
from lowroll.weights import aligned
from lowroll.weights.noise import NoiseSchedule
from lowroll.weights.publish import dequantize_base, quantize_base

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOOKED_AT = 128  # prompts of an environment whose lengths size the KV cache


@dataclass(frozen=True)
class Place:
    """Where a run computes."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dense(self) -> str:
        """The format that is the run's own dtype."""
        name = dense.of(self.dtype)
        assert name is not None
        return name


def configuration(
    config: str | Path | RunConfig | Mapping[str, object], overrides: Mapping[str, object]
) -> tuple[RunConfig, dict[Path, str]]:
    """The settings of a YAML file, a mapping or a RunConfig. An `env` may be, or have as its `id`,
    an Environment class; one of a notebook or script needs a file in `output_dir/environments`.
    Beside the settings the texts of these files, which are not written here."""
    classes: list[type[Environment]] = []
    texts: dict[Path, str] = {}

    def read(write: Callable[[type[Environment]], str]) -> RunConfig:
        return as_config(cells.replaced(config, write), cells.replaced(overrides, write))

    def look(cls: type[Environment]) -> str:
        classes.append(cls)
        return "reverse-text"

    def name(cls: type[Environment]) -> str:
        path, text = cells.as_file(cls, Path(cfg.output_dir) / ENVIRONMENTS)
        if text is not None:
            texts[path] = text
        return f"{path}:{cls.__qualname__}"

    cfg = read(look)
    return read(name) if classes else cfg, texts


def place(cfg: RunConfig) -> Place:
    """Device and dtype; `auto` is CUDA with bfloat16 when there is one, else the CPU with
    float32."""
    device = pick_device(cfg.device)
    if cfg.dtype != "auto":
        return Place(device, _DTYPES[cfg.dtype])
    return Place(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def rollout_format(cfg: RunConfig, where: Place, weights: str | None = None) -> str:
    """The engine's weight format; `dense` is the run's own dtype."""
    weights = weights or cfg.rollout.weights
    return where.dense if weights == "dense" else weights


def learner(cfg: RunConfig, where: Place) -> Transformer:
    """The model that learns: all of it, or a fresh adapter on a frozen base that the engine shares
    (LoRA).

    Of a low-bit folder all of the dequantized weights learn, or LoRA keeps the folder's own tensors
    as its base.

    Its weights are scaled first and its forward is aligned last, when the configuration asks for
    either.
    """
    early = cfg.train.lora and cfg.train.uaq_scale is None  # dense weights are scaled
    frozen = rollout_format(cfg, where) if early else None
    refuse_adapter("model", cfg.model)
    model = hf.load(cfg.model, where.device, where.dtype, frozen)
    if not cfg.train.lora and model.weight_format is not None:
        log.warning(
            "the model's weights are %s: their dequantized values are the weights that learn",
            model.weight_format,
        )
        dequantize_base(model)
    if cfg.train.uaq_scale is not None:
        scaling.scale(model, cfg.train.uaq_scale)
    if cfg.train.lora:
        quantize_base(model, rollout_format(cfg, where))
        lora.attach(
            model,
            cfg.train.lora_rank,
            cfg.train.lora_alpha,
            cfg.train.lora_target_modules,
            cfg.seed,
        )
    else:
        model.requires_grad_(True)
    if cfg.train.forward == "aligned":
        aligned.align(model, rollout_format(cfg, where))
    return recompute.apply(model, cfg.train.activation_checkpointing)


def tokenizer(source: str | Path) -> ChatTokenizer:
    """The chat tokenizer of a model folder or hub id."""
    return ChatTokenizer(load_tokenizer(hf.resolve(source, weights=False)))


def engine(
    cfg: RunConfig,
    where: Place,
    model: Transformer,
    chat: ChatTokenizer,
    weights: str | None = None,
    workloads: Sequence[Workload] = (),
) -> Engine:
    """A rollout engine over `model`, in `weights` or the run's own rollout format, with a cache for
    `workloads`. The second format (`rollout.large_batch_weights`) belongs to the run's own: any
    other is asked for to be that format and nothing else.
    """
    rollout, name = cfg.rollout, rollout_format(cfg, where, weights)
    large_batch_weights = (
        rollout.large_batch_weights if name == rollout_format(cfg, where) else None
    )
    return Engine(
        model,
        weights=name,
        dtype=None if get_format(name).dense else where.dtype,
        tokenizer=chat.tokenizer,
        page_size=rollout.page_size,
        cache_tokens=rollout.cache_tokens,
        workloads=workloads,
        max_batch=rollout.max_batch,
        prefill_chunk=rollout.prefill_chunk,
        noisy=cfg.noise is not None,
        large_batch_weights=large_batch_weights,
        keep_dense=rollout.keep_dense,
    )


def with_cache(cfg: RunConfig, cache_tokens: int | None) -> RunConfig:
    """The same settings with a cache of this size."""
    return cfg.model_copy(
        update={"rollout": cfg.rollout.model_copy(update={"cache_tokens": cache_tokens})}
    )


def workloads(
    cfg: RunConfig,
    model: Transformer,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    held_out: Mapping[str, Environment],
) -> list[Workload]:
    """What a run has in its engine together: the batch of each stage and, if it evaluates, the
    examples. Empty when the cache has a size already.

    The longest of an environment's first prompts stands for all; a rare longer one finds room, and
    others may wait.
    """
    if cfg.rollout.cache_tokens is not None:
        return []
    found, train = (
        [],
        [n for env in envs.values() for n in prompt_lengths(env, "train", LOOKED_AT, chat)],
    )
    for now in cfg.each_stage():
        most, response = longest_prompt(now, model), now.rollout.max_tokens
        prompt = max((length for length in train if length <= most), default=most)
        found.append(
            Workload(now.num_groups, now.rollouts_per_example, prompt, response, most + response)
        )
        if cfg.eval.interval:
            found.append(eval_workload(now, model, chat, held_out))
    return found


def eval_workload(
    cfg: RunConfig, model: Transformer, chat: ChatTokenizer, envs: Mapping[str, Environment]
) -> Workload:
    """What an evaluation has in the engine together."""
    most, examples, response = (
        longest_prompt(cfg, model),
        cfg.eval.num_examples,
        cfg.rollout.max_tokens,
    )
    lengths = [
        n
        for env in envs.values()
        for n in prompt_lengths(env, "test", min(examples, LOOKED_AT), chat)
    ]
    prompt = max((length for length in lengths if length <= most), default=most)
    return Workload(examples, cfg.eval.rollouts_per_example, prompt, response, most + response)


def prompt_lengths(env: Environment, split: str, count: int, chat: ChatTokenizer) -> list[int]:
    """Tokens of the first prompts of a split."""
    size = env.size(split)
    return [
        len(chat.encode_chat(prompt_at(env, i, split).messages))
        for i in range(min(count, size or count))
    ]


def environments(envs: tuple[EnvConfig, ...], seed: int) -> dict[str, Environment]:
    """Environments by name. ValueError when two share a name, or a variable that one passes on is
    not set."""
    passed = [child.named(env.pass_env, f"env {env.name or env.id!r}: pass_env") for env in envs]
    made = [_environment(env, seed, secrets) for env, secrets in zip(envs, passed, strict=True)]
    names = [env.name for env in made]
    if len(set(names)) < len(names):
        raise ValueError(
            f"env: two environments are named {max(names, key=names.count)!r}; give each a name"
        )
    return dict(zip(names, made, strict=True))


def _environment(env: EnvConfig, seed: int, secrets: Mapping[str, str]) -> Environment:
    try:
        return make(env.id, name=env.name, args=env.args, seed=seed)
    except ValueError as error:
        raise ValueError(readable(str(error), secrets)) from (None if secrets else error)


def scorer(cfg: RunConfig, envs: tuple[EnvConfig, ...]) -> ScorerPool:
    """Scoring workers for these environments. Training and evaluation may use one name with
    different arguments."""
    specs = {env.name or env.id: (env.id, dict(env.args), cfg.seed) for env in envs}
    variables = sorted({name for env in envs for name in env.pass_env})
    return ScorerPool(
        specs, cfg.score.workers, cfg.score.time_limit, cfg.score.memory_limit_mb, variables
    )


def sampling(cfg: RunConfig) -> Sampling:
    """How rollouts are drawn."""
    rollout = cfg.rollout
    return Sampling(
        max_tokens=rollout.max_tokens,
        min_tokens=rollout.min_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        stop_strings=rollout.stop,
    )


def eval_sampling(cfg: RunConfig) -> Sampling:
    """How evaluation draws: by a sampler of its own, up to the length and the stops of the
    rollouts."""
    mine = cfg.eval
    return Sampling(
        max_tokens=cfg.rollout.max_tokens,
        temperature=mine.temperature,
        top_k=mine.top_k,
        top_p=mine.top_p,
        min_p=mine.min_p,
        repetition_penalty=mine.repetition_penalty,
        stop_strings=cfg.rollout.stop,
    )


def longest_prompt(cfg: RunConfig, model: Transformer) -> int:
    """Prompt tokens that leave room for a whole response. ValueError when there are none."""
    least, _, owner = _row(cfg, model)
    if least <= cfg.rollout.max_tokens:
        raise ValueError(
            f"rollout.max_tokens: {cfg.rollout.max_tokens} leaves no room for a prompt in {owner} "
            f"of "
            f"{least} tokens"
        )
    return least - cfg.rollout.max_tokens


def _row(cfg: RunConfig, model: Transformer) -> tuple[int, str, str]:
    """(tokens, the key that says so, what it is) of the longest prompt and response together."""
    limits = [
        (model.spec.max_position, "model", "the model's context"),
        (cfg.train.tokens_per_microbatch, "train.tokens_per_microbatch", "a micro-batch"),
    ]
    if cfg.rollout.cache_tokens is not None:
        limits.append((cfg.rollout.cache_tokens, "rollout.cache_tokens", "the KV cache"))
    return min(limits, key=lambda limit: limit[0])


def check_prompts(
    cfg: RunConfig,
    model: Transformer,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    split: str = "train",
) -> None:
    """ValueError naming the setting to which all of an environment's first prompts are too long."""
    for now in cfg.each_stage():
        most = longest_prompt(now, model)
        for env in envs.values():
            lengths = prompt_lengths(env, split, LOOKED_AT, chat)
            if lengths and min(lengths) > most:
                tokens, key, _ = _row(now, model)
                response = now.rollout.max_tokens
                raise ValueError(
                    f"{key}: {tokens} tokens are too few: the shortest of the first {len(lengths)} "
                    f"prompts of env {env.name!r} has {min(lengths)} and rollout.max_tokens is "
                    f"{response}, which makes {min(lengths) + response}"
                )


def check_stages(cfg: RunConfig, model: Transformer) -> None:
    """ValueError when a stage of the run has no room for a prompt beside its longest response."""
    for stage in cfg.stages:
        try:
            longest_prompt(cfg.at(stage.step), model)
        except ValueError as error:
            raise ValueError(f"the stage that begins at step {stage.step}: {error}") from None


def orchestrator_settings(cfg: RunConfig, model: Transformer) -> Settings:
    schedule = cfg.rollout.temp_scheduler
    return Settings(
        batch_size=cfg.batch_size,
        rollouts_per_example=cfg.rollouts_per_example,
        sampling=sampling(cfg),
        temperature_schedule=None
        if schedule is None
        else TemperatureSchedule(
            schedule.start_temperature, schedule.end_temperature, cfg.train.max_steps, schedule.type
        ),
        seed=cfg.seed,
        env_weights={env.name or env.id: env.weight for env in cfg.env},
        advantage=cfg.advantage or "grpo",
        max_prompt_tokens=longest_prompt(cfg, model),
        dynamic_sampling=bool(cfg.dapo.dynamic_sampling),
        max_rounds=cfg.dapo.max_rounds,
        no_signal=cfg.dapo.no_signal,
        overlong_max=cfg.dapo.overlong_max,
        overlong_cache=cfg.dapo.overlong_cache,
        filters=_filters(cfg, model.spec.vocab_size),
        max_error_rate=cfg.score.max_error_rate,
    )


def _filters(cfg: RunConfig, vocab_size: int) -> tuple[Filter, ...]:
    return tuple(
        Gibberish(vocab_size, f.token_id_threshold, f.logprob_offset, f.enforce)
        if f.type == "gibberish"
        else Repetition(f.window, f.prob_threshold, f.enforce)
        for f in cfg.filters
    )


def learn_settings(cfg: RunConfig) -> LearnSettings:
    train = cfg.train
    return LearnSettings(
        select(cfg.algorithm, cfg.correction),
        cfg.objective_options,
        minibatches=train.minibatches,
        tokens_per_microbatch=train.tokens_per_microbatch,
        kl_coef=cfg.loss.kl_coef,
        kl_estimator=cfg.loss.kl_estimator,
        logprob_chunk=train.logprob_chunk,
    )


def guard(cfg: RunConfig) -> Guard | None:
    """The watch over the mismatch. Under LoRA a wider format than the base's would only round the
    base again, so a fallback leads to dense rollouts at once."""
    return (
        None
        if cfg.guard is None
        else Guard(
            GuardSettings(**cfg.guard.model_dump()), cfg.rollout.weights, to_dense=cfg.train.lora
        )
    )


def optim_settings(cfg: RunConfig) -> OptimSettings:
    """The policy's; its schedule spans the steps in which it learns, those after a critic's
    warm-up."""
    train = cfg.train
    steps = train.max_steps - (cfg.critic.warmup_steps if cfg.algorithm == "ppo" else 0)
    return OptimSettings(
        train.learning_rate,
        train.lr_scheduler_type,
        train.warmup_steps,
        steps,
        train.min_lr_ratio,
        train.weight_decay,
        train.betas,
        train.eps,
        train.max_grad_norm,
        train.optimizer,
    )


def critic(cfg: RunConfig, where: Place, chat: ChatTokenizer) -> Critic | None:
    """PPO's critic, with a head of zeros on the model that its section names; None for any other
    algorithm."""
    if cfg.algorithm != "ppo":
        return None
    mine, train = cfg.critic, cfg.train
    if mine.model is not None:
        refuse_adapter("critic.model", mine.model)
        refuse_other_vocabulary("critic.model", mine.model, cfg, chat)
    body = hf.load(mine.model or cfg.model, where.device, where.dtype)
    recompute.apply(dequantize_base(body), train.activation_checkpointing)
    optim = OptimSettings(
        mine.learning_rate,
        weight_decay=mine.weight_decay,
        betas=train.betas,
        eps=train.eps,
        max_grad_norm=mine.max_grad_norm,
    )
    return Critic(
        body,
        optim,
        CriticSettings(
            mine.gamma,
            mine.lam,
            mine.whiten,
            mine.value_clip,
            mine.warmup_steps,
            train.tokens_per_microbatch,
        ),
    )


def noise_schedule(cfg: RunConfig) -> NoiseSchedule | None:
    noise = cfg.noise
    return (
        None
        if noise is None
        else NoiseSchedule(
            noise.sigma_start,
            noise.sigma_end,
            noise.num_stages,
            noise.schedule,
            noise.variant,
            cfg.train.max_steps,
            cfg.seed,
        )
    )


def reference(cfg: RunConfig, where: Place) -> Transformer | None:
    """The frozen model of the KL term under full fine-tuning. Under LoRA it is the learner with its
    adapter off."""
    if not cfg.loss.kl_coef or cfg.train.lora:
        return None
    return hf.load(cfg.model, where.device, where.dtype).requires_grad_(False)


def refuse_adapter(key: str, source: str | Path) -> None:
    """ValueError when the folder that a setting names holds an adapter, and no model of its own."""
    if (hf.resolve(source, weights=False) / "adapter_config.json").is_file():
        raise ValueError(
            f"{key}: {source} is an adapter folder, and a whole model is needed here; merge it "
            f"into its "
            f"base first (lowroll export {source} OUT --as merged)"
        )


def refuse_other_vocabulary(key: str, source: str, cfg: RunConfig, chat: ChatTokenizer) -> None:
    """ValueError when the tokens of the model that a setting names are not those of the run's."""
    if load_tokenizer(hf.resolve(source, weights=False)).get_vocab() != chat.tokenizer.get_vocab():
        raise ValueError(
            f"{key}: the vocabulary of {source} is not that of {cfg.model}: the same ids would be "
            f"other "
            "words"
        )


def teacher(cfg: RunConfig, where: Place, chat: ChatTokenizer) -> Transformer | None:
    """The frozen model of AIPO's teacher_tau. ValueError when its tokens are not those of the run's
    model."""
    if not asks_teacher(cfg):
        return None
    assert cfg.train.teacher is not None
    refuse_other_vocabulary("train.teacher", cfg.train.teacher, cfg, chat)
    return hf.load(cfg.train.teacher, where.device, where.dtype).requires_grad_(False)


def asks_teacher(cfg: RunConfig) -> bool:
    """Whether the loss reads log-probs of `train.teacher`."""
    return (
        cfg.train.teacher is not None and cfg.correction == "aipo" and cfg.loss.aipo.teacher_tau > 0
    )


def about(cfg: RunConfig, where: Place, model: Transformer) -> Mapping[str, str]:
    """The run in words, for the report's header."""
    spec = model.spec
    learned = f"LoRA rank {cfg.train.lora_rank}" if cfg.train.lora else "full fine-tuning"
    if cfg.train.uaq_scale is not None:
        learned += f", update-aware scaling {cfg.train.uaq_scale:g}"
    noise = (
        ""
        if cfg.noise is None
        else (
            f", noise {cfg.noise.sigma_start:g} to {cfg.noise.sigma_end:g} "
            f"({cfg.noise.schedule}, learner {cfg.noise.learner})"
        )
    )
    stages = "".join(
        f", {cfg.at(stage.step).rollout.max_tokens} from step {stage.step}" for stage in cfg.stages
    )
    cache = (
        ""
        if cfg.rollout.cache_tokens is None
        else f", a KV cache of {cfg.rollout.cache_tokens:,} tokens"
    )
    critic = (
        ""
        if cfg.algorithm != "ppo"
        else (
            f"; critic {cfg.critic.model or 'of the same model'}, learning rate "
            f"{cfg.critic.learning_rate:g}"
        )
    )
    return {
        "title": Path(cfg.output_dir).resolve().name,
        "model": f"{cfg.model} ({spec.architecture}, {spec.num_parameters / 1e6:.1f} M parameters)",
        "algorithm": cfg.algorithm,
        "learning": f"{learned}, {cfg.algorithm}, {cfg.train.optimizer}, {cfg.train.forward} "
        f"forward, "
        f"learning rate {cfg.train.learning_rate:g}{critic}",
        "env": ", ".join(env.name or env.id for env in cfg.env),
        "rollout": f"{rollout_format(cfg, where)} weights, {cfg.rollouts_per_example} samples a "
        f"prompt, "
        f"at most {cfg.rollout.max_tokens} tokens{stages}{noise}{cache}",
        "correction": next(
            (
                note.removeprefix("correction: ")
                for note in cfg.notes
                if note.startswith("correction: ")
            ),
            cfg.correction,
        ),
        "device": f"{where.device}, {str(where.dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads",
    }
