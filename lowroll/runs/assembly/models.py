"""The learner of a run, and its other models: reference, teacher and critic."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowroll.config import RunConfig
from lowroll.kernels.matmul.w8a8_cuda import scaled_mm_supports
from lowroll.model import exact, hf, lora, scaling, shared_prompts
from lowroll.model.folder import resolve
from lowroll.model.headers import low_bit_format
from lowroll.model.spec import ModelSpec, read_spec
from lowroll.model.tokenizer import ChatTokenizer, load_tokenizer
from lowroll.model.transformer import Transformer
from lowroll.parallel.ranks import ALONE, Ranks
from lowroll.quant import mixed
from lowroll.runs.assembly import exactness, trainer
from lowroll.runs.assembly.compute import Compute
from lowroll.trainer import recompute
from lowroll.trainer.critic import Critic
from lowroll.weights import aligned_forward
from lowroll.weights.publish import dequantize_base, quantize_base

log = logging.getLogger(__name__)


def learner(cfg: RunConfig, compute: Compute) -> Transformer:
    """Load the learner: all weights, or a fresh adapter on a frozen base that the engine shares.

    A low-bit folder is dequantized to learn whole. Weights are scaled first; the forward is aligned
    last.
    """
    train = cfg.train
    format = compute.format(cfg.rollout.weights)
    refuse_adapter("model", cfg.model)
    refuse_scale(cfg)
    # Scaling needs an adapter's base dense; it is quantized afterwards.
    format_on_load = format if train.lora and train.uaq_scale is None else None
    model = hf.load(cfg.model, compute.device, compute.dtype, format_on_load)
    refuse_backward(cfg, compute, model.spec)
    refuse_sharing(cfg, compute, model.spec)
    if not train.lora and model.weight_format is not None:
        log.warning(
            "the model's weights are %s: their dequantized values are the weights that learn",
            model.weight_format,
        )
        dequantize_base(model)
    if train.uaq_scale is not None:
        scaling.scale(model, train.uaq_scale)
    if train.lora:
        quantize_base(model, format)
        lora.attach(model, train.lora_rank, train.lora_alpha, train.lora_target_modules, cfg.seed)
    else:
        model.requires_grad_(True)
    if cfg.forward_weights is not None:
        aligned_forward.align(model, compute.format(cfg.forward_weights))
    if exactness.of_learner(cfg, compute, model.spec):
        exact.make(model)
    if train.backward == "fp8":
        aligned_forward.transpose(model)
    return recompute.apply(model, train.sized().activation_checkpointing or False)


def outline(key: str, source: str, compute: Compute) -> Transformer:
    """Build a model's shapes on the meta device."""
    refuse_adapter(key, source)
    spec = read_spec(resolve(source, weights=False, key=key))
    return Transformer(spec, "meta", compute.dtype)


def beside(cfg: RunConfig) -> dict[str, tuple[str, str]]:
    """Return (setting, source) of the other models, by name."""
    sources = {}
    if asks_reference(cfg):
        sources["reference"] = "model", cfg.model
    if asks_teacher(cfg):
        assert cfg.train.teacher is not None
        sources["teacher"] = "train.teacher", cfg.train.teacher
    if cfg.has_critic:
        if cfg.critic.model is None:
            sources["critic"] = "model", cfg.model
        else:
            sources["critic"] = "critic.model", cfg.critic.model
    return sources


def tokenizer(
    source: str | Path,
    tool_format: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> ChatTokenizer:
    """Load the chat tokenizer of a model folder or hub id."""
    return ChatTokenizer(
        load_tokenizer(resolve(source, weights=False)), tool_format, template_kwargs
    )


def chat_of(cfg: RunConfig) -> ChatTokenizer:
    return tokenizer(cfg.model, cfg.rollout.tool_call_parser, cfg.chat_template_kwargs)


def critic(
    cfg: RunConfig, compute: Compute, chat: ChatTokenizer, ranks: Ranks = ALONE
) -> Critic | None:
    """Load PPO's critic with a zero head, or None."""
    if not cfg.has_critic:
        return None
    source = cfg.critic.model
    if source is not None:
        refuse_adapter("critic.model", source)
        refuse_other_vocabulary("critic.model", source, cfg, chat)
    critic_model = hf.load(source or cfg.model, compute.device, compute.dtype)
    refuse_sharing(cfg, compute, critic_model.spec)
    recompute.apply(
        dequantize_base(critic_model), cfg.train.sized().activation_checkpointing or False
    )
    return Critic(critic_model, trainer.critic_optim(cfg), trainer.critic(cfg), ranks=ranks)


def reference(cfg: RunConfig, compute: Compute) -> Transformer | None:
    """Load the frozen model of the KL term, or None: under LoRA the learner without its adapter
    serves."""
    if not asks_reference(cfg):
        return None
    return hf.load(cfg.model, compute.device, compute.dtype).requires_grad_(False)


def asks_reference(cfg: RunConfig) -> bool:
    return cfg.loss.kl_coef > 0 and not cfg.train.lora


def teacher(cfg: RunConfig, compute: Compute, chat: ChatTokenizer) -> Transformer | None:
    """Load the frozen teacher of AIPO, or None. ValueError for another vocabulary."""
    if not asks_teacher(cfg):
        return None
    assert cfg.train.teacher is not None
    refuse_other_vocabulary("train.teacher", cfg.train.teacher, cfg, chat)
    return hf.load(cfg.train.teacher, compute.device, compute.dtype).requires_grad_(False)


def asks_teacher(cfg: RunConfig) -> bool:
    return (
        cfg.train.teacher is not None and cfg.correction == "aipo" and cfg.loss.aipo.teacher_tau > 0
    )


def refuse_adapter(key: str, source: str | Path) -> None:
    if (resolve(source, weights=False, key=key) / "adapter_config.json").is_file():
        raise ValueError(
            f"{key}: {source} is an adapter folder, and a whole model is needed here; merge it "
            f"into its base first (lowroll export {source} OUT --as merged)"
        )


def refuse_scale(cfg: RunConfig) -> None:
    """Raise ValueError when the weights to scale are frozen codes."""
    stored_format = low_bit_format(resolve(cfg.model, weights=False))
    if cfg.train.uaq_scale is not None and cfg.train.lora and stored_format is not None:
        raise ValueError(
            f"train.uaq_scale: {cfg.model} holds {mixed.title(stored_format)} weights, which an "
            "adapter's base keeps; scale the dense model, or write null"
        )


def refuse_backward(cfg: RunConfig, compute: Compute, spec: ModelSpec) -> None:
    if cfg.train.backward == "dense":
        return
    if spec.mixture.num_experts:
        raise ValueError(
            f"train.backward: {cfg.train.backward}: experts' products ({spec.architecture}) have no "
            "gradient in fp8; write dense"
        )
    if compute.device.type == "cuda" and not (support := scaled_mm_supports(compute.device)):
        raise ValueError(f"train.backward: {cfg.train.backward}: {support.why_not}; write dense")


def refuse_sharing(cfg: RunConfig, compute: Compute, spec: ModelSpec) -> None:
    if not cfg.train.share_prompts:
        return
    if why := shared_prompts.obstacle(spec, compute.device, compute.dtype):
        raise ValueError(
            f"train.share_prompts: {spec.architecture} reads whole sequences: {why}; write null"
        )


def refuse_other_vocabulary(key: str, source: str, cfg: RunConfig, chat: ChatTokenizer) -> None:
    other_tokenizer = load_tokenizer(resolve(source, weights=False, key=key))
    if other_tokenizer.get_vocab() != chat.tokenizer.get_vocab():
        raise ValueError(
            f"{key}: the vocabulary of {source} is not that of {cfg.model}: the same ids would be "
            f"other words"
        )
