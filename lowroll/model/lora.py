"""LoRA (Hu et al. 2021): y += (alpha / r) B A x, trained in float32 on a frozen base.

An adapter folder has PEFT's format (`base_model.model.<module>.lora_A.weight` [r, in],
`lora_B.weight` [out, r]), a record of the base (`lowroll.model.adapter_base`) and a card. Each part
of a fused matrix has its own pair.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowroll.model import adapter_base as bases
from lowroll.model import adapter_card
from lowroll.model.adapter import Adapter
from lowroll.model.adapter_base import read_adapter_config
from lowroll.model.config_values import integer, positive
from lowroll.model.device import total_memory
from lowroll.model.files import some, tensor_headers
from lowroll.model.folder import copy_tokenizer, resolve
from lowroll.model.headers import low_bit_format, require_headers
from lowroll.model.names import FUSED, features_read
from lowroll.model.short_names import KNOWN
from lowroll.model.spec import ModelSpec
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, all_finite
from lowroll.quant.layouts import LINEARS
from lowroll.types import printable

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NAMES = tuple(suffix.removeprefix(".") for suffix in LINEARS)
# other keys of PEFT's config must be neutral
_KNOWN_KEYS = {
    "peft_type",
    "task_type",
    "r",
    "lora_alpha",
    "target_modules",
    "init_lora_weights",
    "lora_dropout",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
    "peft_version",
    "megatron_core",
    "qalora_group_size",
}
_NEUTRAL_VALUES: tuple[object, ...] = (None, False, "none", "", [], {})
# matrices that do not read a norm
_ELSEWHERE = ("o_proj", "out_proj", "down_proj", "q_b_proj", "kv_b_proj")
_LORA_A_AFTER_NORM = tuple(f"{part}.lora_A.weight" for part in _NAMES if part not in _ELSEWHERE)
_FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")
_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
_PEFT_MODULES = {
    "qkv": "self_attn",
    "o": "self_attn",
    "latent.qkv_a": "self_attn",
    "latent.q_b": "self_attn",
    "latent.kv_b": "self_attn",
    "latent.o": "self_attn",
    "delta.qkvz": "linear_attn",
    "delta.o": "linear_attn",
    "gate_up": "mlp",
    "down": "mlp",
}


def attach(
    model: Transformer, rank: int, alpha: float, targets: Sequence[str] = TARGETS, seed: int = 0
) -> Transformer:
    """Freeze the model and add a fresh adapter, the identity, to every target: A uniform (Kaiming,
    a = sqrt 5), B zero. ValueError as of `check`, and for too little memory."""
    check(model.spec, rank, alpha, targets)
    needed_bytes = 4 * sum(
        math.prod(shape) for shape in _adapter_shapes(model, rank, targets).values()
    )
    memory = total_memory(model.device)
    if memory is not None and needed_bytes > memory:
        raise ValueError(
            f"lora_rank: adapters of rank {rank:,} take {needed_bytes / 1e9:,.1f} GB, and {model.device} "
            f"has {memory / 1e9:,.1f} GB"
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for _, linear in model.linears():
        linear.adapter = None
        target_parts = adapted_parts(linear.parts, targets)
        if not target_parts:
            continue
        linear.adapter = Adapter(rank, alpha)
        bound = 1 / math.sqrt(linear.in_features)
        for part in target_parts:
            a_RK = torch.empty(rank, linear.in_features).uniform_(
                -bound, bound, generator=generator
            )
            linear.adapter.a[part] = nn.Parameter(a_RK.to(model.device))
            linear.adapter.b[part] = nn.Parameter(
                torch.zeros(linear.parts[part], rank, device=model.device)
            )
    return model


def check(spec: ModelSpec, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Raise ValueError unless targets are in the model and no matrices of experts, and the rank is
    at least 1."""
    # the letters of a text would count as targets
    unknown = [targets] if isinstance(targets, str) else sorted(set(targets) - set(_NAMES))
    if unknown or not targets:
        raise ValueError(
            f"lora_target_modules: expected a list out of {', '.join(_NAMES)}, got "
            f"{unknown or targets}"
        )
    if spec.mixture.num_experts and (expert_targets := sorted(set(targets) & set(_EXPERT_PARTS))):
        raise ValueError(
            f"lora_target_modules: {', '.join(expert_targets)} are experts' matrices in "
            f"{spec.architecture}, which take no adapter; choose out of "
            f"{', '.join(attention_targets(spec))}"
        )
    parts = list(features_read(spec))
    present: set[str] = set()
    for part in adapted_parts(parts, targets):
        present |= {part, *FUSED.get(part, ())}
    if absent := sorted(set(targets) - present):
        raise ValueError(
            f"lora_target_modules: {spec.architecture} has no {', '.join(absent)}; choose out of "
            f"{', '.join(parts)}"
        )
    if rank < 1:
        raise ValueError(f"lora_rank: expected at least 1, got {rank}")
    if not math.isfinite(alpha):
        raise ValueError(f"lora_alpha: expected a finite number, got {alpha}")


# vLLM loads an adapter of this matrix and does not apply it (issue #48974)
NOT_IN_VLLM = "kv_b_proj"


def attention_targets(spec: ModelSpec) -> tuple[str, ...]:
    if spec.latent is None:
        return TARGETS[:4]
    return tuple(spec.latent.in_features(spec.num_heads, spec.hidden_size))


def adapted_parts(parts: Iterable[str], targets: Sequence[str]) -> list[str]:
    """Return the adapted parts: those named, and a fused matrix whose parts all are."""
    return [
        part
        for part in parts
        if part in targets or (part in FUSED and set(FUSED[part]) <= set(targets))
    ]


@contextmanager
def disabled(model: Transformer) -> Iterator[Transformer]:
    adapters = [linear.adapter for _, linear in model.linears() if linear.adapter is not None]
    were_enabled = [adapter.enabled for adapter in adapters]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield model
    finally:
        for adapter, enabled in zip(adapters, were_enabled, strict=True):
            adapter.enabled = enabled


def merge(model: Transformer) -> Transformer:
    """Add the adapters into dense weights, rounding once. ValueError for a quantized base."""
    for name, linear in model.linears():
        if linear.adapter is None:
            continue
        if isinstance(linear.weight, QTensor):
            raise ValueError(
                f"{name}: the base is {linear.weight.format}; merge into a dense model instead"
            )
        with torch.no_grad():
            for part in linear.adapter.a:
                update = linear.adapter.b[part] @ linear.adapter.a[part] * linear.adapter.scaling
                rows = linear.rows(part)
                linear.weight[rows] = linear.weight[rows].float() + update
        linear.adapter = None
    return model


def state(model: Transformer, input_scale: float = 1.0) -> dict[str, Tensor]:
    """Return the adapter's tensors under PEFT's names. input_scale: the s of scaled norms
    (`model.scaling`), by which A behind a norm is multiplied to fit the unscaled base."""
    return unscaled({name: p.detach() for name, p in _named_parameters(model)}, input_scale)


def unscaled(tensors: Mapping[str, Tensor], input_scale: float) -> dict[str, Tensor]:
    return {
        name: tensor * input_scale
        if input_scale != 1 and name.endswith(_LORA_A_AFTER_NORM)
        else tensor
        for name, tensor in tensors.items()
    }


def wanted(model: Transformer, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of an adapter of this rank."""
    return {
        name: (rank, p.shape[1]) if name.endswith(".lora_A.weight") else (p.shape[0], rank)
        for name, p in _named_parameters(model)
    }


def are_whole_targets(lacking: Set[str], every: Set[str]) -> bool:
    """Return whether an adapter lacks some targets entirely, but not all."""
    targets = {name.split(".")[-3] for name in lacking}
    of_targets = {name for name in every if name.split(".")[-3] in targets}
    return lacking == of_targets and of_targets != every


def pairs(
    linear: str, adapter: Adapter, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    names = {part: _peft_names(linear, part) for part in adapter.a}
    return {part: (tensors[a], tensors[b]) for part, (a, b) in names.items() if a in tensors}


def _named_parameters(model: Transformer) -> Iterator[tuple[str, nn.Parameter]]:
    for name, linear in model.linears():
        if linear.adapter is None:
            continue
        for part in linear.adapter.a:
            a, b = _peft_names(name, part)
            yield a, linear.adapter.a[part]
            yield b, linear.adapter.b[part]


def _peft_names(linear: str, part: str) -> tuple[str, str]:
    _, layer, kind = linear.split(".", 2)
    stem = f"base_model.model.model.layers.{layer}.{_PEFT_MODULES[kind]}.{part}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def _adapter_shapes(
    model: Transformer, rank: int, targets: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, linear in model.linears():
        for part in adapted_parts(linear.parts, targets):
            shapes |= zip(
                _peft_names(name, part),
                ((rank, linear.in_features), (linear.parts[part], rank)),
                strict=True,
            )
    return shapes


def save(
    model: Transformer,
    folder: str | Path,
    base: str = "",
    tokenizer_from: str | Path | None = None,
    input_scale: float = 1.0,
) -> Path:
    """Publish the adapter as a PEFT folder, atomically, with another folder's tokenizer files.
    base: a folder or hub id. ValueError without an adapter, FileExistsError for an existing folder.
    """
    from lowroll.checkpoint.atomic_folders import publish_folder

    if all(linear.adapter is None for _, linear in model.linears()):
        raise ValueError("the model has no adapter to save")
    base = _absolute_base(base)

    def write_all(target: Path) -> None:
        write(model, target, base, tokenizer_from, input_scale)
        base_is_folder = base and (Path(base) / "config.json").is_file()
        base_format = low_bit_format(Path(base)) if base_is_folder else None
        adapter_card.write(target, base, bases.of(model, input_scale), base_format)

    return publish_folder(Path(folder), write_all, {"kind": "adapter"})


def write(
    model: Transformer,
    target: Path,
    base: str,
    tokenizer_from: str | Path | None = None,
    input_scale: float = 1.0,
    revision: str | None = None,
) -> None:
    """Write the adapter and its base's record. revision: of a base on the hub."""
    alpha = next(linear.adapter.alpha for _, linear in model.linears() if linear.adapter)
    write_tensors(state(model, input_scale), target, alpha, _absolute_base(base), revision)
    bases.write(bases.of(model, input_scale), target)
    copy_tokenizer(tokenizer_from, target)


def write_tensors(
    tensors: Mapping[str, Tensor],
    target: Path,
    alpha: float,
    base: str,
    revision: str | None = None,
) -> None:
    """Write an adapter's tensors and config. ValueError unless they are of one adapter."""
    ranks = {t.shape[0] for name, t in tensors.items() if name.endswith(".lora_A.weight")}
    parts = {name.split(".")[-3] for name in tensors}
    if len(ranks) != 1 or not parts <= set(_NAMES):
        raise ValueError(f"{some(tensors)}: not the tensors of an adapter of one rank")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ranks.pop(),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [part for part in _NAMES if part in parts],
        "base_model_name_or_path": base,
    }
    config |= {} if revision is None else {"revision": revision}
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, target / "adapter_model.safetensors", metadata={"format": "pt"})


def _absolute_base(base: str) -> str:
    folder = resolve(base) if base in KNOWN else Path(base).expanduser()
    return str(folder.resolve()) if base and folder.is_dir() else base


def load(model: Transformer, folder: str | Path, input_scale: float = 1.0) -> Transformer:
    """Attach a PEFT folder's adapter to a model, which changes only if everything fits.
    input_scale: as in `state`. ValueError names the file, and the key or tensors that are damaged,
    missing, misshapen or unsupported."""
    folder = Path(folder)
    config_path, weights_path = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for path in (config_path, weights_path):
        if not path.is_file():
            raise ValueError(
                f"{path}: no such file; an adapter folder holds adapter_config.json and "
                "adapter_model.safetensors"
            )
    rank, alpha, targets = _read_config(config_path)
    check(model.spec, rank, alpha, targets)
    shapes = _adapter_shapes(model, rank, targets)
    wanted_headers = {name: (shape, _FLOAT_DTYPES) for name, shape in shapes.items()}
    found = tensor_headers(weights_path)
    unexpected = sorted(found.keys() - shapes.keys())
    require_headers(weights_path, found, wanted_headers, unexpected, f" for r = {rank}")
    tensors = load_file(weights_path)
    if nonfinite_names := [name for name, tensor in tensors.items() if not all_finite(tensor)]:
        raise ValueError(
            f"{weights_path}: tensors with a non-finite value: {some(nonfinite_names)}"
        )
    attach(model, rank, alpha, targets)
    with torch.no_grad():
        for name, p in _named_parameters(model):
            reads_scaled = name.endswith(_LORA_A_AFTER_NORM)
            p.copy_(tensors[name] / input_scale if reads_scaled else tensors[name])
    return model


def stored(folder: Path, input_scale: float = 1.0) -> tuple[float, dict[str, Tensor]]:
    """Return (alpha, tensors) of a PEFT folder on the CPU, unchecked. ValueError names the file and
    key."""
    _, alpha, _ = _read_config(folder / "adapter_config.json")
    weights_path = folder / "adapter_model.safetensors"
    tensor_headers(weights_path)  # explains a damaged file
    return alpha, {
        name: tensor / input_scale if name.endswith(_LORA_A_AFTER_NORM) else tensor
        for name, tensor in load_file(weights_path).items()
    }


def _read_config(path: Path) -> tuple[int, float, list[str]]:
    config = read_adapter_config(path)
    try:
        rank, alpha = integer(config, "r"), positive(config, "lora_alpha")
    except ValueError as error:
        raise ValueError(f"{path}: {printable(error)}") from None
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets or not _parts(targets) <= set(_NAMES):
        raise ValueError(
            f"{path}: target_modules: expected a list out of {', '.join(_NAMES)}, got "
            f"{printable(repr(targets))}"
        )
    if config.get("init_lora_weights") not in (None, True, False, "gaussian", "orthogonal"):
        raise ValueError(
            f"{path}: init_lora_weights: {printable(repr(config['init_lora_weights']))} changes "
            "the base weights, and is not supported; convert the adapter to a plain one with PEFT"
        )
    for key, value in config.items():
        if key not in _KNOWN_KEYS and value not in _NEUTRAL_VALUES:
            raise ValueError(f"{path}: {printable(key)}: {printable(repr(value))} is not supported")
    return rank, alpha, sorted(_parts(targets), key=_NAMES.index)


def _parts(targets: list[object]) -> set[str]:
    """Return the named parts of a block. PEFT names them one by one for `all-linear` in a small
    model; the tensors show whether one is missing."""
    return {str(target).rpartition(".")[2] for target in targets}
