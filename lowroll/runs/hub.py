"""The upload of a run's folder to the Hugging Face hub, with a model card.

The token is the hub's login or HF_TOKEN; no setting, file or log of lowroll has it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lowroll
from lowroll.checkpoint.atomic_folders import MANIFEST
from lowroll.config import RunConfig, load
from lowroll.envs.data.rows import is_hub_id
from lowroll.metrics.record import read
from lowroll.types import HUB_NAME, RunFailed

log = logging.getLogger(__name__)

CARD, ADAPTER = "README.md", "adapter_config.json"
SHOWN = ("reward/mean", "eval/", "rollout/length_mean", "mismatch/kl_k3", "sft/loss")
MOST_SHOWN = 20


def check(name: str | None) -> None:
    """Raise ValueError for an invalid repository name, or without a login."""
    from huggingface_hub import get_token

    if name is None:
        return
    if re.fullmatch(HUB_NAME, name) is None:
        raise ValueError(f"push_to_hub: {name!r} is no repository: write ORG/NAME")
    if not get_token():
        raise ValueError(
            "push_to_hub: nobody is logged in to the hub: run `hf auth login`, or set HF_TOKEN"
        )


def push(folder: Path, name: str, run: Path, kind: str) -> str:
    """Upload a folder to the private repository `name`, created if missing; return its address.

    ValueError for a folder with its own base, which others could not load; RunFailed when the hub
    refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if (folder / "base").is_dir():
        raise ValueError(
            f"push_to_hub: {folder} is an adapter that names its base by a path of this machine; "
            "push it --as merged or adapter"
        )
    card_text = card(folder, name, run, kind)
    operations = [
        CommitOperationAdd(path.relative_to(folder).as_posix(), str(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST, CARD)
    ]
    operations.append(CommitOperationAdd(CARD, card_text.encode()))
    hub = HfApi(library_name="lowroll", library_version=lowroll.__version__)
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        commit = hub.create_commit(
            name, operations, commit_message=f"lowroll: {kind} of {run.name}"
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise RunFailed(f"push_to_hub: {name}: {' '.join(str(error).split())[:500]}") from error
    return str(getattr(commit, "repo_url", None) or name)


def offer(final: Path, cfg: RunConfig) -> None:
    """Upload a finished run's folder. A failure is a warning with the command to retry."""
    assert cfg.push_to_hub is not None
    run = Path(cfg.output_dir)
    kind = "adapter" if cfg.train.lora else "merged"
    try:
        address = push(final, cfg.push_to_hub, run, kind)
    except (RunFailed, ValueError) as error:
        log.warning(
            "%s. The run has ended well and %s is whole; to try again: lowroll export %s OUT --as "
            "%s --push-to-hub %s",
            error,
            final,
            run,
            kind,
            cfg.push_to_hub,
        )
        return
    log.info("pushed %s to %s", final, address)


# -- the card ------------------------------------------------------------------------------------


def card(folder: Path, name: str, run: Path, kind: str) -> str:
    """Return the README.md of an upload."""
    cfg = load(run / "config.yaml") if (run / "config.yaml").is_file() else None
    sections = [f"# {name.partition('/')[2]}", *_own_card_text(folder)]
    if cfg is not None:
        sections += ["## Training", _markdown_table(_training_rows(cfg), "setting")]
        last_metrics = _last_metrics(run)
        if last_metrics:
            sections += ["## Last numbers", _markdown_table(last_metrics, "metric")]
    sections += ["## Use", *_usage(name, kind, cfg)]
    return _front_matter(cfg, kind) + "\n\n".join(sections) + "\n"


def _front_matter(cfg: RunConfig | None, kind: str) -> str:
    from huggingface_hub import ModelCardData

    base = cfg.model if cfg is not None and is_hub_id(cfg.model) else None
    tags = ["lowroll"]
    if cfg is not None:
        tags.append(cfg.algorithm)
    if kind == "adapter":
        tags.append("lora")
        if base is not None:
            tags.append(f"base_model:adapter:{base}")
    data = ModelCardData(
        base_model=base,
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
        datasets=_data_sets(cfg) or None,
    )
    return f"---\n{data.to_yaml()}\n---\n\n"


def _public_name(name: str) -> str:
    return name if is_hub_id(name) else Path(name).name


def _data_sets(cfg: RunConfig | None) -> list[str]:
    paths = [str(env.args.get("path")) for env in cfg.env] if cfg is not None else []
    return [path for path in dict.fromkeys(paths) if is_hub_id(path)]


def _own_card_text(folder: Path) -> list[str]:
    path = folder / CARD
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8").partition("\n---\n")[2].strip()
    return [text.partition("\n\n")[2].strip()] if text.startswith("# ") else [text]


def _training_rows(cfg: RunConfig) -> dict[str, Any]:
    rows: dict[str, Any] = {
        "base": _public_name(cfg.model),
        "algorithm": cfg.algorithm,
        "correction": cfg.correction,
        "rollouts": f"{cfg.rollout.weights} weights, {cfg.rollout.cache.policy} cache",
        "data": ", ".join(_public_name(env.name or env.id) for env in cfg.env),
        "batch": f"{cfg.batch_size} rollouts, {cfg.rollouts_per_example} a prompt",
        "learning rate": f"{cfg.train.learning_rate:g}",
    }
    if cfg.train.lora:
        rows["LoRA"] = f"rank {cfg.train.lora_rank}, alpha {cfg.train.lora_alpha:g}"
    return rows | {"made with": f"lowroll {lowroll.__version__}"}


def _last_metrics(run: Path) -> dict[str, Any]:
    records = read(run)
    if not records:
        return {}
    metrics = {  # a later record replaces an earlier one
        key: f"{value:.4g}"
        for record in records
        for key, value in record.items()
        if key.startswith(SHOWN) and value is not None
    }
    return {"step": records[-1]["step"], **dict(sorted(metrics.items())[:MOST_SHOWN])}


def _markdown_table(rows: Mapping[str, Any], title: str) -> str:
    lines = [f"| {title} | |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {key} | {value} |" for key, value in rows.items())])


def _usage(name: str, kind: str, cfg: RunConfig | None) -> list[str]:
    if kind == "rollout" and cfg is not None:
        return [
            f"Low-bit weights ({cfg.rollout.weights}), bit for bit what the rollouts were drawn "
            "from:",
            f"    hf download {name} --local-dir FOLDER\n"
            f"    lowroll generate --model FOLDER --weights {cfg.rollout.weights}",
        ]
    if kind == "adapter":
        base = "BASE" if cfg is None else _public_name(cfg.model)
        code = (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{base}")\n'
            f'model = PeftModel.from_pretrained(model, "{name}")'
        )
    else:
        code = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
        )
    return [f"```python\n{code}\n```"]
