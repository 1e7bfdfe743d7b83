"""`lowroll sft`: a supervised warm start from the configuration, published as a Hugging Face folder."""
from __future__ import annotations

from pathlib import Path

from lowroll import assemble
from lowroll.config import RunConfig
from lowroll.metrics.progress import phases
from lowroll.metrics.record import Recorder, write_about
from lowroll.model import hf, lora
from lowroll.trainer.optim import OptimSettings
from lowroll.trainer.sft import Demonstration, SftSettings, demonstrations, read_demonstrations, train_sft


def run_sft(cfg: RunConfig) -> Path:
    """Train as `cfg.sft` (and `cfg.train` for what both stages share) says; returns the published model folder.

    The folder is `output_dir/final`; `output_dir` also gets config.yaml and metrics.jsonl. ValueError when it exists.
    """
    cfg, folder = cfg.resolved(), Path(cfg.output_dir)
    if (folder / "config.yaml").exists():
        raise ValueError(f"output_dir: {folder} already holds a run; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(cfg.dump())
    warm_start(cfg, hf.resolve(cfg.model), folder / "final", Recorder(folder))
    return folder / "final"


def warm_start(cfg: RunConfig, source: Path, target: Path, recorder: Recorder | None = None) -> dict[str, float]:
    """Train the model of folder `source` on demonstrations, publish it as folder `target`; the last step's metrics."""
    where, sft = assemble.place(cfg), cfg.sft
    plain = cfg.train.model_copy(update={"uaq_scale": None, "forward": "dense"})      # both belong to what follows
    cfg = cfg.model_copy(update={"model": str(source), "train": plain})
    chat, model = assemble.tokenizer(cfg.model), assemble.learner(cfg, where)
    if recorder is not None:
        write_about(recorder.path.parent, assemble.about(cfg, where, model))
    settings = SftSettings(
        sft.steps, sft.batch_size,
        OptimSettings(sft.learning_rate, sft.lr_scheduler_type, sft.warmup_steps, sft.steps, sft.min_lr_ratio,
                      cfg.train.weight_decay, cfg.train.betas, cfg.train.eps, cfg.train.max_grad_norm,
                      cfg.train.optimizer),
        cfg.train.tokens_per_microbatch, cfg.train.logprob_chunk, cfg.seed)
    with phases() as on_phase:
        def on_step(step: int, metrics: dict[str, float]) -> None:
            on_phase("sft", step, sft.steps)
            if recorder is not None:
                recorder.write(step, metrics)

        metrics = train_sft(model, chat.tokenizer, _examples(cfg), settings, on_step)
    if cfg.train.lora:
        lora.save(model, target, base=str(source), tokenizer_from=source)
    else:
        hf.save(model, target, tokenizer_from=source)
    return metrics


def _examples(cfg: RunConfig) -> list[Demonstration]:
    if cfg.sft.data is not None:
        return read_demonstrations(Path(cfg.sft.data))
    envs = assemble.environments(cfg.env, cfg.seed)
    weights = [env.weight for env in cfg.env]
    return demonstrations(list(zip(envs.values(), weights, strict=True)), cfg.sft.num_examples, cfg.seed)
