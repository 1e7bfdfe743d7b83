"""The learner's state for a bitwise resume, as named tensors and JSON.

tensors["model"]         every trainable parameter by name (LoRA: the adapter alone)
tensors["optimizer"]     AdamW's moments, Muon's momentum, and float32 masters
tensors["critic"], tensors["critic_optimizer"], state["critic"]   the same of PPO's critic
state["optimizer"]       training steps, updates applied, updates refused in a row
state["version"]         policy version of the weights
state["last_step"]       the last batch consumed: an older one is refused
state["uaq_scale"]       the scale of the weights (`model.scaling`), which are never scaled twice
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowroll.model import scaling
from lowroll.model.transformer import Transformer
from lowroll.parallel.ranks import ALONE, Ranks
from lowroll.trainer.critic import Critic
from lowroll.trainer.optim import Optimizer, check_saved
from lowroll.weights import derived_tensors

Tensors = dict[str, dict[str, Tensor]]


def capture(
    model: Transformer, optimizer: Optimizer, critic: Critic | None = None
) -> tuple[Tensors, dict[str, Any]]:
    """Return this rank's state. The tensors are live: write them before the next step."""
    moments, counters = optimizer.state()
    tensors = {"model": optimizer.weights(), "optimizer": moments}
    state = {"optimizer": counters, "uaq_scale": scaling.applied(model)}
    if critic is None:
        return tensors, state
    critic_tensors, critic_counters = critic.state()
    return tensors | critic_tensors, state | {"critic": critic_counters}


@torch.no_grad()
def restore(
    model: Transformer,
    optimizer: Optimizer,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    critic: Critic | None = None,
) -> None:
    """Restore the `capture` of all ranks in place, bitwise, and requantize an aligned model.

    ValueError, before anything changes, for other parameters or a different weight scaling.
    """
    saved = tensors["model"]
    ranks = optimizer.ranks
    ranks.forget()
    _check_saved(model, saved, state, ranks)
    if critic is None and "critic" in state:
        raise ValueError("critic state: there, but the run has no critic")
    if critic is not None and "critic" not in state:
        raise ValueError("critic state: missing")
    if critic is not None:
        critic.restore(tensors, state["critic"])
    optimizer.restore(tensors["optimizer"], state["optimizer"])
    restore_weights(model, saved, state, ranks)


@torch.no_grad()
def restore_weights(
    model: Transformer,
    saved: Mapping[str, Tensor],
    state: Mapping[str, Any],
    ranks: Ranks = ALONE,
) -> None:
    """Restore the trainable parameters except sharded masters, and an aligned model's codes."""
    _check_saved(model, saved, state, ranks)
    for name, param in model.trainable_parameters().items():
        local_param = ranks.part(param)
        if local_param.dtype == saved[name].dtype:
            local_param.copy_(ranks.cut(saved[name], param))
    derived_tensors.renew(model)


def _check_saved(
    model: Transformer, saved: Mapping[str, Tensor], state: Mapping[str, Any], ranks: Ranks
) -> None:
    if state.get("uaq_scale") != scaling.applied(model):
        raise ValueError(
            f"model state: uaq_scale: the saved weights carry {state.get('uaq_scale')}, and the "
            f"model {scaling.applied(model)}"
        )
    params = model.trainable_parameters()
    expected = {name: (param.shape, ranks.dtype(param)) for name, param in params.items()}
    check_saved("model state", saved, expected)
