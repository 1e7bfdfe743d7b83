"""Keys of other tools (TRL, verl, prime-rl, slime, Surogate, vLLM), and their meaning here.

A key is looked up by its dotted end, so `n_gpus_per_node` also stands for
`trainer.n_gpus_per_node`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowroll.config.document import Path

GROUP = "rollouts_per_example (rollouts a prompt)"
BATCH = "batch_size (rollouts a step, all prompts together)"
ROW = "train.tokens_per_microbatch (packed tokens a forward pass; a prompt and its response must fit in)"
RENAMED: dict[str, str] = {
    # the model, the run
    "model_name": "model",
    "model_name_or_path": "model",
    "model_path": "model",
    "model.path": "model",
    "model.name": "model",
    "base_model": "model",
    "hf_checkpoint": "model",
    "pretrained_model_name_or_path": "model",
    "save_dir": "output_dir",
    "run_name": "output_dir (a run is named by its folder)",
    "experiment_name": "output_dir (a run is named by its folder)",
    "default_local_dir": "output_dir",
    "bf16": "dtype: bfloat16",
    "fp16": "dtype: bfloat16 (float16 is not there)",
    "torch_dtype": "dtype",
    **dict.fromkeys(
        (
            "report_to",
            "wandb",
            "use_wandb",
            "tensorboard",
            "mlflow",
            "trackio",
            "logger",
            "monitor",
        ),
        "track (a list of wandb, tensorboard, trackio, mlflow)",
    ),
    **dict.fromkeys(("wandb_project", "project_name"), "track_project"),
    "hub_model_id": "push_to_hub (ORG/NAME)",
    "environment": "env",
    "environments": "env",
    **dict.fromkeys(
        ("dataset", "dataset_name", "dataset_path", "train_files", "prompt_data", "data_path"),
        "data.path (a file, folder or hub id)",
    ),
    "val_files": "data.test_path",
    **dict.fromkeys(("dataset_config", "dataset_config_name", "data.name"), "data.subset"),
    "dataset_train_split": "data.split",
    "dataset_test_split": "data.test_split",
    **dict.fromkeys(("prompt_key", "input_key", "prompt_column"), "data.prompt (its column)"),
    **dict.fromkeys(("label_key", "answer_key", "solution_column"), "data.answer (its column)"),
    **dict.fromkeys(
        ("reward_functions", "reward_func", "custom_reward_function", "reward_model"),
        "reward_funcs ([file.py:function], beside data)",
    ),
    # rollouts
    "num_generations": GROUP,
    "n_samples_per_prompt": GROUP,
    "group_size": GROUP,
    "rollout.n": GROUP,
    "rollouts_per_prompt": GROUP,
    "samples_per_prompt": GROUP,
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "response_length": "rollout.max_tokens",
    "rollout_max_response_len": "rollout.max_tokens",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "rollout_top_k": "rollout.top_k",
    "stop_strings": "rollout.stop",
    "kv_cache_dtype": "rollout.kv.dtype",
    "kv_budget": "rollout.kv.budget (of rollout.kv.policy)",
    "quantization": "rollout.weights",
    "quantize": "rollout.weights",
    "rollout_precision": "rollout.weights",
    "max_num_seqs": "rollout.max_batch",
    "free_cache_engine": "rollout.release_cache",
    "enable_sleep_mode": "rollout.release_cache",
    # vLLM
    **dict.fromkeys(("use_vllm", "vllm_mode"), "rollout.engine: vllm"),
    **dict.fromkeys(
        ("rollout.name", "backend", "inference_engine"), "rollout.engine (native, vllm)"
    ),
    **dict.fromkeys(
        (
            "vllm_server_host",
            "vllm_server_base_url",
            "server",
            "vllm.host",
            "vllm.port",
            "vllm.base_url",
        ),
        "rollout.vllm.url (of rollout.engine: vllm)",
    ),
    "vllm_gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization (of rollout.engine: vllm)",
    **dict.fromkeys(
        ("tensor_model_parallel_size", "vllm_tensor_parallel_size"),
        "rollout.vllm.tensor_parallel_size (of rollout.engine: vllm)",
    ),
    "enforce_eager": "rollout.cuda_graphs: false",
    "enable_prefix_caching": "rollout.prefix_caching",
    "engine_kwargs": "rollout.vllm.serve_args (of rollout.engine: vllm)",
    # several GPUs
    **dict.fromkeys(
        (
            "num_gpus",
            "n_gpus",
            "ngpus",
            "n_gpus_per_node",
            "num_gpus_per_node",
            "actor_num_gpus_per_node",
            "actor_num_nodes",
            "nnodes",
            "num_nodes",
            "num_processes",
            "nproc_per_node",
            "world_size",
            "dp",
            "data_parallel_size",
            "ddp",
            "accelerate",
            "distributed",
        ),
        "train.gpus (of the learner; those of engines: rollout.engines)",
    ),
    "rollout_num_gpus": "rollout.engines",
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "zero_level", "zero_stage"),
        "train.sharding (none, full), of train.gpus",
    ),
    "colocate": "launcher: local, where engines share the learner's GPUs if there are no others",
    # asynchrony
    **dict.fromkeys(
        ("async_level", "async_training", "fully_async", "staleness_threshold"),
        "asynchrony.max_async_level",
    ),
    "max_staleness": "asynchrony.max_off_policy_steps",
    "partial_rollout": "asynchrony.partial",
    # batches and lengths
    "train_batch_size": BATCH,
    "global_batch_size": BATCH,
    "rollout_batch_size": BATCH,
    "generation_batch_size": BATCH,
    "per_device_train_batch_size": BATCH,
    "per_gpu_batch_size": BATCH,
    "gradient_accumulation_steps": "train.minibatches (updates a batch; packing needs no accumulation)",
    "ppo_mini_batch_size": "train.minibatches (how many updates a batch gives)",
    "mini_batch_size": "train.minibatches (how many updates a batch gives)",
    "num_iterations": "train.minibatches (updates a batch; a batch is learnt from once)",
    "ppo_micro_batch_size_per_gpu": ROW,
    "micro_batch_size": ROW,
    "ppo_max_token_len_per_gpu": ROW,
    "max_tokens_per_gpu": ROW,
    "seq_len": ROW,
    "max_seq_len": ROW,
    "max_seq_length": ROW,
    "sequence_len": ROW,
    "max_length": ROW,
    "max_prompt_length": f"{ROW}; longer prompts are passed over",
    # the learner
    "lr": "train.learning_rate",
    "optim.lr": "train.learning_rate",
    "lr_scheduler": "train.lr_scheduler_type",
    "optim": "train.optimizer",
    "warmup_ratio": "train.warmup_steps",
    "lr_warmup_steps": "train.warmup_steps",
    "total_training_steps": "train.max_steps",
    "num_steps": "train.max_steps",
    "num_rollout": "train.max_steps",
    "num_train_epochs": "train.max_steps",
    "total_epochs": "train.max_steps",
    "epochs": "train.max_steps",
    "gradient_checkpointing": "train.activation_checkpointing",
    "enable_gradient_checkpointing": "train.activation_checkpointing",
    "recompute": "train.activation_checkpointing",
    "max_grad_clip": "train.max_grad_norm",
    "clip_grad": "train.max_grad_norm",
    "grad_clip": "train.max_grad_norm",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "adam_epsilon": "train.eps",
    "lora_r": "train.lora_rank",
    "use_peft": "train.lora: true",
    "peft_config": "train.lora: true, train.lora_rank",
    "lora_config": "train.lora: true, train.lora_rank",
    "target_modules": "train.lora_target_modules",
    "qlora": "train.lora: true with rollout.weights: nf4",
    "load_in_4bit": "train.lora: true with rollout.weights: nf4",
    # the objective
    "beta": "loss.kl_coef",
    "kl_beta": "loss.kl_coef",
    "kl_loss_coef": "loss.kl_coef",
    "init_kl_coef": "loss.kl_coef",
    "use_kl_loss": "loss.kl_coef (0 is off)",
    "kl_loss_type": "loss.kl_estimator",
    "epsilon": "loss.eps_low, loss.eps_high",
    "clip_ratio": "loss.eps_low, loss.eps_high",
    "eps_clip": "loss.eps_low, loss.eps_high",
    "cliprange": "loss.eps_low, loss.eps_high",
    "epsilon_high": "loss.eps_high",
    "clip_ratio_high": "loss.eps_high",
    "eps_clip_high": "loss.eps_high",
    "clip_ratio_low": "loss.eps_low",
    "clip_ratio_c": "loss.dual_clip",
    "loss_type": "algorithm, loss.reduce",
    "loss_agg_mode": "loss.reduce",
    "adv_estimator": "algorithm",
    "advantage_estimator": "algorithm",
    "scale_rewards": "algorithm: dr_grpo or grpo_no_std",
    "importance_sampling_level": "algorithm: gspo (sequence) or grpo (token)",
    "tis_imp_ratio_cap": "loss.cap",
    "use_tis": "correction: tis",
    "filter_groups": "dapo.dynamic_sampling",
    "mask_truncated_completions": "dapo.overlong_max, dapo.overlong_cache",
    "overlong_buffer": "dapo.overlong_max, dapo.overlong_cache",
    # records and logs
    "log_interval": "logging_steps",
    "save_steps": "ckpt.interval",
    "save_freq": "ckpt.interval",
    "save_interval": "ckpt.interval",
    "checkpoint_interval": "ckpt.interval",
    "save_total_limit": "ckpt.keep_last",
    "eval_steps": "eval.interval",
    "test_freq": "eval.interval",
    "eval_interval": "eval.interval",
    "resume_from_checkpoint": "lowroll grpo run.yaml --resume",
    "resume": "lowroll grpo run.yaml --resume",
    "resume_mode": "lowroll grpo run.yaml --resume",
    "load": "lowroll grpo run.yaml --resume",
}

OTHER_SHARES = (
    "other ways to share one model or its memory; train.gpus learns on several GPUs (train.sharding), "
    "and train.lora, rollout.weights: nvfp4 and train.optimizer: adamw8bit make each hold more"
)
ENGINES = "another engine; rollouts come from lowroll's own or from vLLM (rollout.engine)"
ABSENT: dict[str, str] = {
    **dict.fromkeys(
        (
            "num_gpus_per_engine",
            "rollout_num_gpus_per_engine",
            "tp",
            "pp",
            "pipeline_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "sequence_parallel_size",
            "ulysses_sequence_parallel_size",
            "ray",
            "ray_kwargs",
            "megatron",
            "offload",
            "param_offload",
            "optimizer_offload",
        ),
        OTHER_SHARES,
    ),
    **dict.fromkeys(("sglang", "sglang_server"), ENGINES),
    **dict.fromkeys(
        ("multi_turn", "max_turns", "tools", "tool_config", "agent", "max_tool_calls"),
        "several turns and tools; an environment asks once and scores one response",
    ),
    "sliding_window": "a window of attention; rollout.kv: {policy: streaming} bounds the rollouts' cache",
    "ref_model": "a reference model of its own; loss.kl_coef pulls to the model as it was at the start",
}
NEEDLESS: dict[str, str] = {
    "hub_token": "the token is the hub's login (hf auth login) or HF_TOKEN",
    "logging_dir": "track: [tensorboard] writes to output_dir/tensorboard",
    "trust_remote_code": "lowroll runs no code of a model's repository",
    **dict.fromkeys(
        ("log_completions", "disable_tqdm"),
        "every step is recorded, with every rollout",
    ),
    "attn_implementation": "lowroll has its own attention",
    "use_liger_kernel": "the fused kernels are lowroll's own, and always on",
    "torch_compile": "decoding is captured in CUDA graphs by itself",
    "max_steps_per_epoch": "the data is drawn anew without end, and train.max_steps says when to stop",
}


def explain(path: Path) -> str:
    """Return the advice for a foreign key; "" for an unknown one."""
    normalized_parts = [str(part).lower().replace("-", "_") for part in path]
    for key_ending in (".".join(normalized_parts[-2:]), normalized_parts[-1]):
        if key_ending in RENAMED:
            return f"here it is {RENAMED[key_ending]}"
        if key_ending in ABSENT:
            return f"not there yet: {ABSENT[key_ending]}"
        if key_ending in NEEDLESS:
            return f"not needed: {NEEDLESS[key_ending]}"
    return ""


def foreign_keys(path: Path, value: Any) -> Iterator[Path]:
    """Yield the foreign keys at `path` or in its section."""
    if explain(path):
        yield path
    elif isinstance(value, dict):
        for key, inner_value in value.items():
            yield from foreign_keys((*path, key), inner_value)
