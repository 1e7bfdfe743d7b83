"""The README.md of an adapter folder, in the hub's form."""

from __future__ import annotations

from pathlib import Path

import torch

from lowroll.model.adapter_base import Base
from lowroll.quant.formats import get_format, stored_format
from lowroll.quant.mixed import Mixed

FILE = "README.md"
_UNMEASURED = (
    "How far it is from the one that learned was not measured here; `lowroll export RUN OUT --as "
    "adapter` measures it on the run's own rollouts."
)


def write(folder: Path, named: str, base: Base, holds: str | None = None, cost: str = "") -> None:
    """Write the card of an adapter on `base`. named: the base's model (a folder, a hub id, or "").
    holds: the low-bit format of its files. cost: the measured effect of the adapter on it."""
    body = [
        "# LoRA adapter",
        f"Learned with lowroll on {f'`{named}`' if named else 'a model without a name'}, linear "
        f"weights {base.weights or 'as they are'}, {base.dtype}.",
    ]
    if (folder / "base").is_dir():
        body += _base_section(base)
    elif base.rounds and stored_format(str(base.weights)) != holds:
        body += _rounding_section(base, cost or _UNMEASURED)
    (folder / FILE).write_text(_front_matter(named) + "\n\n".join(body) + "\n", encoding="utf-8")


def _front_matter(named: str) -> str:
    from huggingface_hub import ModelCardData

    on_the_hub = (
        named.count("/") == 1 and not Path(named).is_absolute() and not Path(named).exists()
    )
    card_data = ModelCardData(
        base_model=named if on_the_hub else None,
        library_name="peft",
        tags=["lora", "lowroll"],
        pipeline_tag="text-generation",
    )
    return f"---\n{card_data.to_yaml()}\n---\n\n"


def _base_section(base: Base) -> list[str]:
    weight_format = get_format(base.weights) if base.low_bit and base.weights else None
    if isinstance(weight_format, Mixed):
        return [
            "The very weights that it stands on are in the folder `base`, several formats in one. "
            "PEFT needs matrices that can be multiplied with, and transformers makes none of such a "
            "folder; lowroll reads it, and `lowroll export FOLDER OUT --as merged` makes one dense "
            "model of both.",
        ]
    if (
        weight_format is not None
        and weight_format.scheme is not None
        and weight_format.scheme.rotated
    ):
        return [
            "The very weights that it stands on are in the folder `base`, rotated as its "
            "`transform_config` says. transformers and PEFT do not read that, and would compute "
            "another model without a word; lowroll and vLLM do.",
        ]
    # PEFT cannot multiply packed codes
    needs_dequantize = (
        weight_format is not None and weight_format.describe(getattr(torch, base.dtype)) is None
    )
    imported_classes = [
        "AutoModelForCausalLM",
        *(["CompressedTensorsConfig"] if needs_dequantize else []),
    ]
    load_arguments = [f'dtype="{base.dtype}"']
    if needs_dequantize:
        load_arguments.append("quantization_config=CompressedTensorsConfig(dequantize=True)")
    code = [
        "from peft import PeftModel",
        f"from transformers import {', '.join(imported_classes)}",
        "",
        "model = AutoModelForCausalLM.from_pretrained(",
        *(f"    {argument}," for argument in ['"./base"', *load_arguments]),
        ")",
        'model = PeftModel.from_pretrained(model, ".")',
    ]
    return [
        "The very weights that it stands on are in the folder `base`: put it on those, and on "
        "no others. With PEFT, in this folder:",
        "\n".join(["```python", *code, "```"]),
    ]


def _rounding_section(base: Base, cost: str) -> list[str]:
    if base.uaq_scale is None:
        scaling_note = ""
    else:
        scaling_note = f" scaled by {base.uaq_scale:g} (update-aware scaling), then"
    return [
        "## What it stands on",
        f"Not on that model as it is: its linear weights were{scaling_note} quantized to {base.weights}, "
        f"and the adapter "
        "learned on what they became, rounding errors and all. `adapter_base.json` says so, and "
        "lowroll makes that "
        "base again by itself (FOLDER is this folder):",
        "    lowroll generate --model FOLDER",
        "PEFT, vLLM and other tools do not read that file. They put the adapter on the model as it "
        "is, which is "
        f"another policy. {cost}",
        "The policy that learned, for them:",
        "    lowroll export FOLDER OUT --as merged     # one dense model\n"
        "    lowroll export FOLDER OUT --as rollout    # the adapter, and the low-bit base under "
        "it in OUT/base",
    ]
