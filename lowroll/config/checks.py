"""The settings of a run that cannot work together (`problems`), and those that rarely work as meant
(`warnings`)."""

from __future__ import annotations

from collections.abc import Iterator

from lowroll.config.auto import correction_of, known_collapse, rollouts_of
from lowroll.config.data import env_problems
from lowroll.config.engine_checks import exact_problems, layer_format_problems, vllm_problems
from lowroll.config.loss import loss_notes, loss_problems
from lowroll.config.process_checks import role_notes, role_problems
from lowroll.config.rollout import kv_problems, noise_problems
from lowroll.config.schema import RunSettings
from lowroll.config.section import CUSTOM, Problem
from lowroll.config.train import CriticConfig, blame, order_problems
from lowroll.config.vllm import VllmConfig
from lowroll.objectives.table import ALGORITHMS
from lowroll.quant.table import is_dense


def problems(cfg: RunSettings) -> Iterator[Problem]:
    """Yield the settings that cannot work together, as keys and a message."""
    rollout = cfg.rollout
    yield from _batch_problems(cfg)
    yield from _stage_problems(cfg)
    yield from kv_problems(rollout.kv)
    yield from vllm_problems(cfg)
    yield from _buffer_problems(cfg)
    yield from role_problems(cfg)
    yield from exact_problems(cfg)
    yield from layer_format_problems(rollout.weights, rollout.engine, rollout.large_batch_weights)
    learner_format = cfg.forward_weights
    if (
        cfg.train.lora
        and learner_format not in (None, rollout.weights)
        and not is_dense(rollout.weights)
    ):
        yield (
            (("train", "forward"), ("rollout", "weights")),
            f"the adapter's base is {rollout.weights}, and the learner multiplies with what it holds; write "
            "aligned or dense",
        )
    if rollout.temp_scheduler is not None and rollout.temperature != 1.0:
        yield (
            (("rollout", "temp_scheduler"), ("rollout", "temperature")),
            "set either rollout.temperature or rollout.temp_scheduler, not both",
        )
    yield from _correction_problems(cfg)
    yield from _critic_problems(cfg)
    yield from noise_problems(cfg.noise)
    yield from _warmup_problems(cfg)
    yield from env_problems(cfg.env, cfg.eval)
    yield from _data_problems(cfg)


def _correction_problems(cfg: RunSettings) -> Iterator[Problem]:
    correction = correction_of(cfg)[0]
    yield from loss_problems(cfg.algorithm, correction, cfg.loss)
    collapse = known_collapse(cfg.correction, rollouts_of(cfg))
    if collapse is not None and not cfg.force:
        approximation = f"{cfg.rollout.weights} rollouts"
        if collapse.price == "kv":
            approximation = f"a cache that {cfg.rollout.cache.policy} bounds"
        yield (
            (("correction",), ("rollout", collapse.price)),
            f"{cfg.correction} with {approximation} is known to collapse ({collapse.seen}); write "
            "auto, or force: true to compare with it",
        )
    if correction == "aipo" and cfg.loss.aipo.teacher_tau and cfg.train.teacher is None:
        yield (
            (("loss", "aipo", "teacher_tau"), ("train", "teacher")),
            "needs train.teacher, the model whose log-probs it pulls to",
        )


def _warmup_problems(cfg: RunSettings) -> Iterator[Problem]:
    for section, warmup_steps, steps_key, num_steps in (
        ("train", cfg.train.warmup_steps, "max_steps", cfg.train.max_steps),
        ("sft", cfg.sft.warmup_steps, "steps", cfg.sft.steps),
    ):
        if warmup_steps > num_steps:
            yield (
                ((section, "warmup_steps"), (section, steps_key)),
                f"{section}.warmup_steps ({warmup_steps}) is more than the {num_steps} steps of the run",
            )


def _batch_problems(cfg: RunSettings) -> Iterator[Problem]:
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


def _stage_problems(cfg: RunSettings) -> Iterator[Problem]:
    yield from order_problems(cfg.stages, cfg.dapo.overlong_max)
    stage_cfg = cfg
    reported_messages = [message for _, message in _batch_problems(cfg)]
    for i, stage in enumerate(cfg.stages):
        stage_cfg = stage_cfg.entering(stage)
        for keys, message in _batch_problems(stage_cfg):
            if message not in reported_messages:
                yield blame(i, (keys, message))
                reported_messages.append(message)


def _length_problems(cfg: RunSettings) -> Iterator[Problem]:
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
    cache_tokens = rollout.cache_tokens
    # bounded caches are checked by their policy (`runs.assembly.prompts`)
    if cache_tokens is not None and cache_tokens <= rollout.max_tokens and not rollout.cache.evicts:
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
    if dapo.overlong_max is None and dapo.overlong_cache is None:
        return
    if dapo.overlong_cache is None:
        yield (("dapo", "overlong_max"),), "needs dapo.overlong_cache beside it"
    elif dapo.overlong_max is None:
        yield (("dapo", "overlong_cache"),), "needs dapo.overlong_max beside it"
    elif dapo.overlong_cache > dapo.overlong_max:
        yield (
            (("dapo", "overlong_cache"), ("dapo", "overlong_max")),
            f"dapo.overlong_cache ({dapo.overlong_cache}) is more than dapo.overlong_max ({dapo.overlong_max})",
        )


def _data_problems(cfg: RunSettings) -> Iterator[Problem]:
    if cfg.data is not None and "env" in cfg.model_fields_set:
        yield (
            (("data",), ("env",)),
            "is an environment of its own; to mix it with others write env: [{id: data, args: "
            "{path: ..., reward_funcs: [...]}}, ...]",
        )
    for key in ("reward_funcs", "reward_weights"):
        if cfg.data is None and getattr(cfg, key):
            yield (((key,),), "needs data beside it; of an env they stand among its args")
    if cfg.data is not None and cfg.reward_weights is not None:
        num_functions = len(cfg.reward_funcs) or 1
        if len(cfg.reward_weights) != num_functions:
            yield (
                (("reward_weights",), ("reward_funcs",)),
                f"{len(cfg.reward_weights)} weights for {num_functions} functions; give each its own",
            )


def _buffer_problems(cfg: RunSettings) -> Iterator[Problem]:
    buffer = cfg.buffer
    easy_threshold, hard_threshold = buffer.easy_threshold, buffer.hard_threshold
    if (
        easy_threshold is not None
        and hard_threshold is not None
        and hard_threshold >= easy_threshold
    ):
        yield (
            (("buffer", "hard_threshold"), ("buffer", "easy_threshold")),
            f"hard_threshold ({hard_threshold:g}) must be below easy_threshold ({easy_threshold:g})",
        )
    for pool, threshold in (("easy", easy_threshold), ("hard", hard_threshold)):
        if getattr(buffer, f"{pool}_fraction") and threshold is None:
            yield (
                (("buffer", f"{pool}_fraction"),),
                f"needs buffer.{pool}_threshold beside it: without one there is no {pool} pool",
            )
    if buffer.online_difficulty_filtering and buffer.skip_verification:
        yield (
            (("buffer", "skip_verification"), ("buffer", "online_difficulty_filtering")),
            "every reward would be 0, and online_difficulty_filtering would draw again for ever",
        )
    if cfg.samples_dynamically and buffer.skip_verification:
        yield (
            (("buffer", "skip_verification"), ("dapo", "dynamic_sampling")),
            "every reward would be 0, and dynamic sampling would drop every group; write "
            "dapo.dynamic_sampling: false",
        )
    yield from _advantage_problems(cfg)


def _advantage_problems(cfg: RunSettings) -> Iterator[Problem]:
    has_function = cfg.advantage_function is not None
    if has_function and cfg.algorithm == "ppo":
        yield (
            (("advantage_function",), ("algorithm",)),
            "ppo's advantages are its critic's; take another algorithm",
        )
    elif has_function and cfg.advantage not in (None, CUSTOM):
        yield (
            (("advantage",), ("advantage_function",)),
            f"{cfg.advantage} beside an advantage_function: leave one of them out",
        )
    if not has_function and cfg.advantage == CUSTOM:
        yield (("advantage",), ("advantage_function",)), "custom needs an advantage_function"


def _critic_problems(cfg: RunSettings) -> Iterator[Problem]:
    if not cfg.has_critic:
        if cfg.advantage == "gae":
            yield (("advantage",), ("algorithm",)), "gae needs a critic; write algorithm: ppo"
        return
    if cfg.advantage not in (None, "gae"):
        yield (
            (("advantage",), ("algorithm",)),
            f"{cfg.advantage} compares the rollouts of a prompt, and ppo's advantages are its "
            f"critic's; write null",
        )
    if cfg.dapo.dynamic_sampling:
        yield (
            (("dapo", "dynamic_sampling"), ("algorithm",)),
            "ppo learns from groups whose rewards are all equal too; write false or null",
        )
    if cfg.critic.warmup_steps >= cfg.train.max_steps:
        yield (
            (("critic", "warmup_steps"), ("train", "max_steps")),
            f"critic.warmup_steps ({cfg.critic.warmup_steps}) leaves none of the "
            f"{cfg.train.max_steps} steps to the policy",
        )


def warnings(cfg: RunSettings) -> Iterator[str]:
    """Yield settings that rarely work as meant. `cfg` is resolved."""
    yield from _mismatch_warnings(cfg)
    if cfg.train.minibatches == 1 and cfg.correction in ("acr", "tbpo"):
        yield (
            f"train.minibatches 1: with one update a batch the policy ratio is 1, so no clip can fire; "
            f"{cfg.correction} then acts as a capped weight"
        )
    reads_teacher = cfg.correction == "aipo" and cfg.loss.aipo.teacher_tau
    if cfg.train.teacher is not None and not reads_teacher:
        yield "train.teacher: no effect without correction aipo and a loss.aipo.teacher_tau above 0"
    if cfg.train.replay_kv and cfg.train.share_prompts and not cfg.has_critic:
        yield "train.share_prompts: no effect with train.replay_kv, which reads whole sequences"
    if cfg.train.replay_kv and not cfg.rollout.cache.evicts:
        yield "train.replay_kv: no effect without a rollout.kv.policy that drops keys"
    yield from _no_effect_notes(cfg)
    yield from role_notes(cfg)
    yield from loss_notes(cfg.correction, cfg.loss)
    for i, stage in enumerate(cfg.stages):
        if stage.step > cfg.train.max_steps:
            yield (
                f"stages[{i}]: step {stage.step} comes after the run's last step, "
                f"{cfg.train.max_steps}: it never begins"
            )
    if not cfg.has_critic and cfg.critic != CriticConfig():
        yield f"critic: no effect, the algorithm is {cfg.algorithm}"


def _mismatch_warnings(cfg: RunSettings) -> Iterator[str]:
    rollouts, correction, weights = rollouts_of(cfg), cfg.correction, cfg.rollout.weights
    ignores_mismatch = correction in ("none", "is")
    if rollouts.truncated and correction == "none":
        yield (
            f"warning: {', '.join(rollouts.truncated)}: the rollouts are drawn from another distribution than the "
            "learner's, and correction none does not pay for it"
        )
    if rollouts.low_bit and ignores_mismatch:
        yield (
            f"warning: {weights} rollouts with correction {correction}: the mismatch with the learner "
            "is not corrected; good for comparison only"
        )
    if rollouts.low_bit and correction == "decoupled":
        yield (
            f"warning: {weights} rollouts with correction decoupled: nothing caps the weights, and QuRL "
            "(Fig. 3) saw them reach 1e5; tis and acr cap them"
        )
    if rollouts.forgets and correction in ("none", "is", "decoupled"):
        yield (
            f"warning: a cache that {rollouts.kv_policy} bounds with correction {correction}: no response is "
            "rejected that lost what it needed (Sparse-RL sec. 4); sparse and reweight reject"
        )
    if rollouts.low_bit_cache and not rollouts.low_bit and ignores_mismatch:
        yield (
            f"warning: an {rollouts.kv_dtype} cache with correction {correction}: its rounding is not corrected; "
            "good for comparison only"
        )
    is_weighted_gspo = cfg.algorithm == "gspo" and correction in ("tis", "decoupled")
    if rollouts.low_bit and not rollouts.lora and is_weighted_gspo:
        yield (
            f"warning: gspo on {weights} rollouts: QaRL (Fig. 8) saw it drift and collapse; correction tbpo "
            "is its mended form"
        )
    if rollouts.noisy and correction == "none":
        yield (
            "warning: noise with correction none: rollouts of the noisy policy are learnt from as if they were the "
            "learner's own (QeRL's setting)"
        )
    if rollouts.stale and correction == "none":
        yield (
            f"warning: {rollouts.stale}, with correction none: rollouts of earlier weights are learnt from as if they "
            "were the learner's own; two of three runs four steps behind ended below their start (docs/results.md)"
        )
    if cfg.train.forward == "aligned" and is_dense(weights):
        yield f"train.forward aligned: {weights} rollouts have no low-bit arithmetic to align with"
    if rollouts.rounds and not rollouts.low_bit and ignores_mismatch:
        yield (
            f"warning: train.forward {cfg.train.forward} with correction {correction}: the "
            "learner rounds and the rollouts do not, and that is not corrected"
        )
    if rollouts.foreign and not rollouts.low_bit and ignores_mismatch:
        yield (
            f"warning: rollouts of {rollouts.engine} with correction {correction}: it rounds otherwise than the "
            "learner, and that is not corrected; good for comparison only"
        )
    differs = (
        rollouts.low_bit
        or rollouts.truncated
        or rollouts.noisy
        or rollouts.forgets
        or rollouts.low_bit_cache
        or rollouts.foreign
        or rollouts.rounds
        or rollouts.stale
    )
    if not differs and correction not in ("none", "tbpo", "aipo", "ipo"):
        yield f"correction {correction}: {weights} rollouts leave it almost nothing to correct"


def _no_effect_notes(cfg: RunSettings) -> Iterator[str]:
    if cfg.rollout.engine != "vllm" and cfg.rollout.vllm != VllmConfig():
        yield f"rollout.vllm: no effect, rollout.engine is {cfg.rollout.engine}"
    eval_cfg = cfg.eval
    sampler_filters = (eval_cfg.top_p, eval_cfg.top_k, eval_cfg.min_p)
    if eval_cfg.temperature == 0 and sampler_filters != (1.0, 0, 0.0):
        yield "eval.top_p, top_k, min_p: no effect at eval.temperature 0, which is greedy"
    if cfg.buffer.skip_verification:
        yield (
            "warning: buffer.skip_verification: no response is scored and EVERY REWARD IS 0: "
            "nothing is learnt from rewards; good for measuring speed only"
        )
    if cfg.advantage_function is not None:
        yield (
            f"advantage_function: the advantages are those of {cfg.advantage_function.import_path}, "
            "whose code runs in the orchestrator"
        )
