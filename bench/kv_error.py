"""What 8 bits a number do to attention whose keys have outliers: ways to store keys, compared.

Keys and queries are normal numbers plus a constant vector (a projection's bias) in the channels of a
few pairs of RoPE, then rotated; 64 queries over 4,096 keys, heads of 128, theta 10^6. The outliers
of the queries are a tenth of the keys'.

    logit    root mean square error of the scores, less each query's mean, which softmax ignores
    KL       of the attention probabilities, against those of exact keys
    output   norm of the outputs' error over the norm of the outputs, values exact

and of a small random model in Qwen2.5's shape with such biases, whose keys and values are both
stored: the mean of |log-prob - log-prob with exact keys and values| over the next tokens.

    unscaled    e4m3 of the keys as they are
    tensor, token, channel    a scale for all, for a token and head, for a channel and head
    + H         keys and queries turned by a Hadamard matrix first
    fine        powers of two a token and head, second codes for 16 channels: what `kv.fp8` does

    python -m bench.kv_error
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lowroll.kernels.attention.codes import E4M3, decode_keys, decode_values, encode
from lowroll.kv.fp8 import fine_channels, key_energy
from lowroll.model.attention import varlen
from lowroll.model.rope import rotations
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Block, Transformer

D, KEYS, QUERIES, THETA = 128, 4096, 64, 1e6
OUTLIERS = {  # pairs, size
    "none": ([], 0.0),
    "slow pairs, 50": ([60, 61, 63], 50.0),
    "slow pairs, 300": ([60, 61, 63], 300.0),
    "slow pairs, 500": ([57, 58, 60, 62, 63], 500.0),
    "middle pairs, 300": ([44, 47, 50], 300.0),
    "fast pairs, 100": ([20, 30], 100.0),
}
Stored = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # q, k [T, G, d], channels


def scaled(x_TGd: Tensor, dims: tuple[int, ...]) -> Tensor:
    """e4m3 with a scale of amax / 448 over these dimensions; none over an empty tuple."""
    if not dims:
        return x_TGd.clamp(-448, 448).to(E4M3).float()
    scale = x_TGd.abs().amax(dims, keepdim=True).clamp_min(1e-20) / 448
    return (x_TGd / scale).clamp(-448, 448).to(E4M3).float() * scale


def turned(x_TGd: Tensor) -> Tensor:
    """Times the orthonormal Hadamard matrix of the head size."""
    h = torch.ones(1, 1)
    while len(h) < x_TGd.shape[-1]:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return x_TGd @ (h / math.sqrt(len(h)))


def fine(q_TGd: Tensor, k_TGd: Tensor, channels_GF: Tensor) -> tuple[Tensor, Tensor]:
    codes = encode(k_TGd, k_TGd, channels_GF)
    return q_TGd, decode_keys(
        codes.keys_TGd, codes.fine_TGF, codes.scales_TG2, channels_GF, torch.float32
    )


def plain(dims: tuple[int, ...], q: Tensor, k: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return q, scaled(k, dims)


def spread(dims: tuple[int, ...], q: Tensor, k: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return turned(q), scaled(turned(k), dims)


def ways() -> dict[str, Stored]:
    grains = {"unscaled": (), "tensor": (0, 1, 2), "token": (2,), "channel": (0,)}
    made: dict[str, Stored] = {
        "exact": lambda q, k, c: (q, k),
        "bfloat16": lambda q, k, c: (q, k.bfloat16().float()),
    }
    made |= {name: partial(plain, dims) for name, dims in grains.items()}
    made |= {f"{name} + H": partial(spread, dims) for name, dims in grains.items()}
    return made | {"fine": fine}


def planted(pairs: list[int], size: float) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, keys [T, 1, d], fine channels)."""
    g = torch.Generator().manual_seed(1)
    angles = torch.rand(len(pairs), generator=g) * 2 * math.pi
    bias_d = torch.zeros(D)
    bias_d[pairs] = size * angles.cos()
    bias_d[[pair + D // 2 for pair in pairs]] = size * angles.sin()
    k = torch.randn(KEYS, D, generator=g) * 1.5 + bias_d
    q = torch.randn(QUERIES, D, generator=g) * 1.5 + bias_d / 10
    pos = torch.arange(KEYS)
    channels = fine_channels(bias_d.square()[None, None])[0]
    return rotated(q, pos[-QUERIES:]), rotated(k, pos), channels


def rotated(x_Td: Tensor, pos_T: Tensor) -> Tensor:
    cos, sin = rotations(pos_T, THETA ** -(torch.arange(0, D, 2) / D))
    a, b = x_Td[:, None].chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention_errors() -> None:
    g = torch.Generator().manual_seed(2)
    values = torch.randn(KEYS, D, generator=g, dtype=torch.float64)
    for name, (pairs, size) in OUTLIERS.items():
        q, k, channels = planted(pairs, size)
        want = _logits(q, k)
        p = want.softmax(-1)
        for way, store in ways().items():
            got = _logits(*store(q, k, channels))
            logit = (got - want).square().mean().sqrt()
            kl = (p * (want.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean()
            output = ((got.softmax(-1) - p) @ values).norm() / (p @ values).norm()
            print(f"{name:18} {way:14} logit {logit:8.4f}  KL {kl:9.5f}  output {output:7.4f}")


def _logits(q_T1d: Tensor, k_T1d: Tensor) -> Tensor:
    logits = q_T1d[:, 0].double() @ k_T1d[:, 0].double().T / math.sqrt(D)
    return logits - logits.mean(-1, keepdim=True)


@torch.no_grad()
def model_errors(tokens: int = 512) -> None:
    """Next-token log-probs of a random model whose keys have biases of `size`, queries a tenth."""
    for size in (0.0, 50.0, 300.0):
        model = _model(size)
        g = torch.Generator().manual_seed(4)
        ids = torch.randint(0, 512, (tokens,), generator=g)
        channels = fine_channels(key_energy(model))
        want = _log_probs(model, ids, lambda layer, q, k, v: (q, k, v))
        for way, store in ways().items():
            error = (_log_probs(model, ids, _both(way, store, channels)) - want).abs()
            print(
                f"model, biases of {size:3.0f}  {way:14} |dlogp| mean {error.mean():.5f}  "
                f"99 % {error.quantile(0.99):.5f}"
            )


def _both(way: str, store: Stored, channels_LGF: Tensor) -> Callable[..., tuple]:
    """What becomes of a layer's keys and values; values in 8 bits are those of `kv.fp8`."""

    def stored(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple:
        if way == "bfloat16":
            v = v.bfloat16().float()
        elif way != "exact":
            codes = encode(v, v, channels_LGF[layer])
            v = decode_values(codes.values_TGd, codes.scales_TG2, v.dtype)
        return (*store(q, k, channels_LGF[layer]), v)

    return stored


def _model(size: float) -> Transformer:
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": D,
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": 1,
    }
    model = Transformer(spec_from_config(config))
    g = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        spread = 0.05 if parameter.ndim > 1 else 0.0
        parameter.copy_(torch.randn(parameter.shape, generator=g) * spread)
        if "norm" in name:
            parameter.fill_(1)
    pairs = [57, 60, 62, 63]
    for block in model.blocks:
        assert isinstance(block, Block) and block.qkv.bias is not None
        for part, height in (("q_proj", size / 10), ("k_proj", size)):
            bias = block.qkv.bias[block.qkv.rows(part)].view(-1, 2, D // 2)
            angles = torch.tensor([0.3, 1.1, 2.0, 4.0])
            bias[:, 0, pairs], bias[:, 1, pairs] = height * angles.cos(), height * angles.sin()
    return model


def _log_probs(model: Transformer, ids: Tensor, stored: Callable[..., tuple]) -> Tensor:
    dense = varlen([len(ids)])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(layer, *stored(layer, q, k, v))

    hidden = model(ids, torch.arange(len(ids)), attend)
    return model.logits(hidden[:-1]).log_softmax(-1).gather(1, ids[1:, None])[:, 0]


if __name__ == "__main__":
    attention_errors()
    model_errors()
