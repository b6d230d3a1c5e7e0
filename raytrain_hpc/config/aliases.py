"""Suggestions for keys that do not exist: former names, the names of other trainers, and typing errors."""

from __future__ import annotations

import difflib

from raytrain_hpc.config.schema import SECTIONS, get_fields

# Former keys of this project.
FORMER_KEYS: dict[str, str] = {
    "model.positions": "model.position_embedding",
    "model.rope_low_factor": "model.rope_low_freq_factor",
    "model.rope_high_factor": "model.rope_high_freq_factor",
    "model.rope_original": "model.rope_original_max_positions",
    "model.balance": "model.load_balancing",
    "model.balance_weight": "model.load_balancing_weight",
    "model.balance_rate": "model.expert_bias_rate",
    "data.readers": "data.num_readers",
    "data.ahead_steps": "data.prefetch_steps",
    "data.ahead_mib": "data.prefetch_mib",
    "data.preload": "data.local_cache",
    "train.global_batch": "train.global_batch_size",
    "train.micro_batch": "train.micro_batch_size",
    "train.grad_clip": "train.max_grad_norm",
    "train.optimizer": "optimizer.name",
    "train.lr": "optimizer.lr",
    "train.beta1": "optimizer.beta1",
    "train.beta2": "optimizer.beta2",
    "train.eps": "optimizer.eps",
    "train.weight_decay": "optimizer.weight_decay",
    "train.schedule": "lr_scheduler.name",
    "train.min_lr": "lr_scheduler.min_lr",
    "train.warmup": "lr_scheduler.warmup_steps",
    "train.decay_fraction": "lr_scheduler.decay_fraction",
    "train.lr_scaling": "lr_scheduler.batch_scaling",
    "train.lr_base_batch": "lr_scheduler.base_batch_size",
    "train.eval_every": "eval.interval",
    "train.eval_samples": "eval.samples",
    "train.lora_rank": "lora.rank",
    "train.lora_alpha": "lora.alpha",
    "train.lora_targets": "lora.target_modules",
    "parallel.schedule": "parallel.pp_schedule",
    "parallel.virtual_stages": "parallel.pp_stages_per_rank",
    "parallel.recompute": "parallel.activation_checkpointing",
    "cluster.threads": "cluster.cpu_threads",
    "cluster.interface": "cluster.network_interface",
    "checkpoint.every": "checkpoint.interval",
    "checkpoint.snapshot_every": "checkpoint.snapshot_interval",
    "checkpoint.buddies": "checkpoint.replicate_snapshots",
    "fault.spike_deviations": "fault.loss_spike_deviations",
    "fault.compare_every": "fault.replica_check_interval",
    "fault.keep_agreed": "fault.keep_verified_state",
    "observe.log_every": "logging.interval",
    "observe.ranks_every": "logging.rank_stats_interval",
    "observe.tensorboard": "logging.tensorboard",
    "observe.ray_metrics": "logging.ray_metrics",
    "observe.wandb": "logging.wandb_project",
    "observe.mlflow": "logging.mlflow_uri",
    "observe.sample_tokens": "logging.sample_tokens",
    "observe.prompts": "logging.prompts",
    "observe.peak_tflops": "logging.peak_tflops",
    "observe.timeline_every": "logging.pipeline_timeline_interval",
    "observe.profile": "profiler.name",
    "observe.profile_ranks": "profiler.ranks",
    "observe.profile_steps": "profiler.steps",
}

# Names that other trainers use (Hugging Face Trainer, nanoGPT, Megatron-LM, DeepSpeed, Lightning, torchrun), without a
# section, and the settings that correspond to them.
FOREIGN_NAMES: dict[str, str] = {
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "max_steps": "train.steps",
    "max_iters": "train.steps",
    "num_train_epochs": "train.steps (optimizer steps; `raytrain-hpc inspect` prints the tokens of an epoch)",
    "per_device_train_batch_size": "train.micro_batch_size (sequences per forward pass)",
    "gradient_accumulation_steps": "train.global_batch_size (accumulation follows from it and train.micro_batch_size)",
    "train_batch_size": "train.global_batch_size",
    "batch_size": "train.global_batch_size",
    "max_grad_norm": "train.max_grad_norm",
    "clip_grad": "train.max_grad_norm",
    "bf16": "train.dtype=bf16",
    "fp16": "train.dtype=bf16",
    "fp8": "train.dtype=float8",
    "precision": "train.dtype",
    "mixed_precision": "train.dtype",
    "gradient_checkpointing": "parallel.activation_checkpointing=full",
    "activation_checkpoint": "parallel.activation_checkpointing",
    "activation_offloading": "parallel.activation_offload=cpu",
    "recompute_granularity": "parallel.activation_checkpointing",
    "recompute_num_layers": "parallel.recompute_layers",
    "fsdp": "parallel.zero=3",
    "sharding_strategy": "parallel.zero (3: FULL_SHARD, 2: SHARD_GRAD_OP, 0: NO_SHARD)",
    "tensor_parallel_size": "parallel.tp",
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_parallel_size": "parallel.pp",
    "pipeline_model_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "expert_parallel_size": "parallel.ep",
    "expert_model_parallel_size": "parallel.ep",
    "num_nodes": "cluster.workers (one per GPU, over all nodes)",
    "devices": "cluster.workers (one per GPU, over all nodes)",
    "nproc_per_node": "cluster.workers (one per GPU, over all nodes)",
    "world_size": "cluster.workers",
    "num_workers": "cluster.workers",
    "output_dir": "run.dir",
    "save_steps": "checkpoint.interval",
    "save_interval": "checkpoint.interval",
    "logging_steps": "logging.interval",
    "log_interval": "logging.interval",
    "eval_steps": "eval.interval",
    "eval_interval": "eval.interval",
    "warmup_ratio": "lr_scheduler.warmup_steps (a number of steps)",
    "warmup_steps": "lr_scheduler.warmup_steps",
    "lr_scheduler_type": "lr_scheduler.name",
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "dim": "model.hidden_size",
    "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "intermediate_size": "model.ffn_size",
    "max_seq_len": "train.seq_len",
    "max_seq_length": "train.seq_len",
    "block_size": "train.seq_len",
    "context_length": "train.seq_len",
    "use_wandb": "logging.wandb_project",
    "report_to": "logging.wandb_project, logging.mlflow_uri or logging.tensorboard",
    "resume_from_checkpoint": "run.dir (a run resumes from the newest checkpoint there; run.resume)",
}


def suggest_key(key: str) -> str:
    """Return a suggestion for a key that does not exist: "did you mean train.steps?", or the known sections."""
    setting = find_setting(key)
    if setting:
        return f"did you mean {setting}?"
    return f"known sections: {', '.join(SECTIONS)}; `raytrain-hpc config` lists all keys"


def find_setting(key: str) -> str:
    """Return the setting that a former, foreign or misspelled key stands for, or "" if none is similar.

    It is a key, a key with its value ("train.dtype=bf16"), or either of them with an explanation in parentheses.
    """
    keys, name = list(get_fields()), key.rpartition(".")[2].replace("-", "_")
    if key in FORMER_KEYS:
        return FORMER_KEYS[key]
    # Foreign names first: a similar key ("train.batch_size" and "train.micro_batch_size") can be another thing.
    if name in FOREIGN_NAMES:
        return FOREIGN_NAMES[name]
    # After typing errors, the most frequent mistake is the right key in a wrong section, or in none ("optim.lr").
    matches = [k for k in keys if k.rpartition(".")[2] == name] if "." not in key else []
    current = {k: k for k in keys} | FORMER_KEYS  # a former key can be misspelled too: train.lrr
    matches = matches or [current[k] for k in difflib.get_close_matches(key, current, n=1, cutoff=0.6)]
    matches = matches or [k for k in keys if k.rpartition(".")[2] == name]
    matches = matches or [new for old, new in FORMER_KEYS.items() if old.rpartition(".")[2] == name]
    return matches[0] if matches else ""
