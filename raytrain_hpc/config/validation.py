"""Validation of a config: ranges, divisibility and combinations of settings, before anything is started."""

from __future__ import annotations

from dataclasses import Field
from math import isfinite
from typing import Any

from raytrain_hpc.config.deadline_text import parse_deadline
from raytrain_hpc.config.schema import (
    AUTO,
    Config,
    DataConfig,
    LoraConfig,
    LrSchedulerConfig,
    OptimizerConfig,
    get_fields,
)
from raytrain_hpc.config.training_config import MAX_BF16_DECAY, OPTIMIZER_NAMES
from raytrain_hpc.config.value_types import convert_value, get_type
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.storage.location import parse_location


def validate_config(config: Config) -> None:
    """Raise ConfigError for the first rule that the config violates."""
    _check_values(config)
    for rule in _RULES:
        rule(config)


def _make_error(config: Config, key: str, remedy: str) -> ConfigError:
    section_name, name = key.split(".")
    section = getattr(config, section_name)
    value = getattr(section, name if hasattr(section, name) else f"{name}_")
    return ConfigError(key, value, config.origin(key), remedy)


def _check_values(config: Config) -> None:
    """Check types, which matters for a config made or changed in Python, and bounds."""
    for key, f in get_fields().items():
        value = getattr(getattr(config, key.partition(".")[0]), f.name)
        try:
            convert_value(value, get_type(key))
        except ValueError as error:
            raise _make_error(config, key, str(error)) from None
        if remedy := _find_bound(value, f):
            raise _make_error(config, key, remedy)
        for index, item in enumerate(value if isinstance(value, list) else ()):
            for name, item_field in getattr(item, "__dataclass_fields__", {}).items():
                item_value = getattr(item, name)
                if remedy := _find_bound(item_value, item_field):
                    raise ConfigError(f"{key}[{index}].{name}", item_value, config.origin(key), remedy)


def _find_bound(value: Any, f: Field[Any]) -> str:
    """Return what a number out of the bounds of its field needs instead, "" for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    minimum, above = f.metadata["minimum"], f.metadata["above"]
    if not isfinite(value):
        return "needs a finite number"
    if minimum is not None and value < minimum:
        return f"needs at least {minimum:g}"
    return f"needs more than {above:g}" if above is not None and value <= above else ""


def _check_run(config: Config) -> None:
    if not config.run.dir or "\0" in config.run.dir:
        raise _make_error(config, "run.dir", "needs a directory")
    for key, location in (("run.dir", config.run.dir), ("run.init_from", config.run.init_from)):
        try:
            parse_location(location)
        except ValueError as error:
            raise _make_error(config, key, f"not a path or URL of an object store: {error}") from None
    if config.run.seed >= 1 << 63:
        raise _make_error(config, "run.seed", "needs a number below 2**63")
    if config.run.deadline != AUTO:
        try:
            parse_deadline(config.run.deadline, start_unix=0.0)
        except ValueError as error:
            raise _make_error(config, "run.deadline", str(error)) from None


def _check_model(config: Config) -> None:
    m = config.model
    if m.head_dim == AUTO and m.hidden_size % m.num_heads:
        remedy = f"must divide model.hidden_size={m.hidden_size}; or set model.head_dim"
        raise _make_error(config, "model.num_heads", remedy)
    head_dim = m.hidden_size // m.num_heads if m.head_dim == AUTO else int(m.head_dim)
    if m.position_embedding == "rotary" and head_dim % 2:
        raise _make_error(config, "model.num_heads", "rotary positions need an even number of channels per head")
    if m.rope_factor > 1 and m.rope_high_freq_factor <= m.rope_low_freq_factor:
        raise _make_error(
            config, "model.rope_high_freq_factor", f"must exceed model.rope_low_freq_factor={m.rope_low_freq_factor:g}"
        )
    if m.num_kv_heads != AUTO and m.num_heads % int(m.num_kv_heads):
        raise _make_error(config, "model.num_kv_heads", f"must divide model.num_heads={m.num_heads}")
    if m.num_experts and m.experts_per_token > m.num_experts:
        raise _make_error(config, "model.experts_per_token", f"must not exceed model.num_experts={m.num_experts}")
    if not m.dropout < 1:
        raise _make_error(config, "model.dropout", "needs a probability below 1")


def _check_data(config: Config) -> None:
    d = config.data
    # A default value is accepted, since a resolved config.yaml spells out all defaults; likewise for
    # lr_scheduler.warmup_steps.
    if d.sources and d.path != DataConfig().path:
        raise _make_error(config, "data.path", "give data.path or data.sources, not both")
    for source in d.sources:
        if not source.path:
            raise _make_error(config, "data.sources", "every source needs a path")
    if d.sources and not sum(source.weight for source in d.sources):
        raise _make_error(config, "data.sources", "at least one weight must be above 0")
    _check_stages(config)
    if d.engine == "ray" and config.cluster.workers == 0:
        raise _make_error(config, "data.engine", "cluster.workers=0 trains without Ray; use engine=local")
    if not d.path and not d.sources:
        raise _make_error(config, "data.path", "needs a dataset directory, stdlib or synthetic")


def _check_stages(config: Config) -> None:
    if config.data.stages and not config.data.sources:
        raise _make_error(config, "data.stages", "stages change the weights of a mixture; they need data.sources")
    previous_start = 0
    for stage in config.data.stages:
        if len(stage.weights) != len(config.data.sources):
            raise _make_error(config, "data.stages", f"each needs {len(config.data.sources)} weights, one per source")
        if not all(0 <= weight < float("inf") for weight in stage.weights) or not sum(stage.weights):
            raise _make_error(config, "data.stages", "weights must be at least 0, and one per stage above 0")
        if stage.from_tokens <= previous_start:
            raise _make_error(config, "data.stages", "from_tokens must be above 0 and increase")
        previous_start = stage.from_tokens


def _check_train(config: Config) -> None:
    t = config.train
    choices = config.auto_choices.get("train.micro_batch_size") or []
    sizes = choices if t.micro_batch_size in choices else [t.micro_batch_size]
    if all(size != AUTO and t.global_batch_size % int(size) for size in sizes):
        divisor = _find_nearest_divisor(t.global_batch_size, int(t.micro_batch_size))
        remedy = f"must divide train.global_batch_size={t.global_batch_size}; {divisor} would"
        raise _make_error(config, "train.micro_batch_size", remedy)
    if t.residual_dtype == "bf16" and t.dtype in ("fp32", "fp64"):
        remedy = f"train.dtype={t.dtype} computes in it; set train.dtype=bf16 or float8, or this to fp32"
        raise _make_error(config, "train.residual_dtype", remedy)
    if t.weight_copies is True and t.dtype in ("fp32", "fp64"):
        remedy = f"train.dtype={t.dtype} casts no weights; set train.dtype=bf16 or float8, or this to auto"
        raise _make_error(config, "train.weight_copies", remedy)
    rounds_shards = t.dtype not in ("fp32", "fp64") or config.parallel.quantize != "none"
    if t.weight_copies is False and t.deterministic == "elastic" and config.parallel.zero > 0 and rounds_shards:
        remedy = (
            "shards are rounded as they are gathered, so that a single shard has to be copied and rounded for the same "
            "bits; leave it auto, or set parallel.zero=0"
        )
        raise _make_error(config, "train.weight_copies", remedy)
    if t.float8_head and t.dtype != "float8":
        raise _make_error(config, "train.float8_head", "needs train.dtype=float8; set that, or this to false")


def _check_optimizer(config: Config) -> None:
    optimizer, scheduler, steps = config.optimizer, config.lr_scheduler, config.train.steps
    for name in ("beta1", "beta2"):
        if getattr(optimizer, name) >= 1:
            raise _make_error(config, f"optimizer.{name}", "needs a number below 1")
    if scheduler.decay_fraction > 1:
        raise _make_error(config, "lr_scheduler.decay_fraction", "needs a fraction of at most 1")
    if scheduler.min_lr != AUTO and float(scheduler.min_lr) > optimizer.lr:
        raise _make_error(config, "lr_scheduler.min_lr", f"must not exceed optimizer.lr={optimizer.lr:g}")
    if scheduler.warmup_steps != LrSchedulerConfig().warmup_steps and scheduler.warmup_steps > steps > 0:
        raise _make_error(config, "lr_scheduler.warmup_steps", f"must not exceed train.steps={steps}")
    if scheduler.batch_scaling != "none" and scheduler.base_batch_size == 0:
        remedy = "lr_scheduler.batch_scaling needs the global batch size at which optimizer.lr was tuned"
        raise _make_error(config, "lr_scheduler.base_batch_size", remedy)


def _check_moment_dtype(config: Config) -> None:
    optimizer = config.optimizer
    if optimizer.moment_dtype == "fp32":
        return
    if optimizer.name not in ("adamw", "muon"):
        remedy = f"optimizer.name={optimizer.name}: this is for adamw and muon; set it to fp32"
        raise _make_error(config, "optimizer.moment_dtype", remedy)
    names = ["beta1", "beta2"] + ["muon_momentum"] * (optimizer.name == "muon")
    for name in names:
        if getattr(optimizer, name) > MAX_BF16_DECAY:
            remedy = (
                "optimizer.moment_dtype=bf16 has 8 significant bits, and would round the decrease of a step away; set "
                f"this to at most {MAX_BF16_DECAY:.3f}, or the moments to fp32"
            )
            raise _make_error(config, f"optimizer.{name}", remedy)


def _check_optimizer_name(config: Config) -> None:
    optimizer, defaults = config.optimizer, OptimizerConfig()
    if optimizer.muon_momentum >= 1:
        raise _make_error(config, "optimizer.muon_momentum", "needs a number below 1")
    if optimizer.name in OPTIMIZER_NAMES:
        if optimizer.args:
            remedy = f"optimizer.name={optimizer.name} has keys of its own, such as optimizer.beta1; set it to {{}}"
            raise _make_error(config, "optimizer.args", remedy)
        return
    if not all(part.isidentifier() for part in optimizer.name.split(".")) or "." not in optimizer.name:
        remedy = f"needs {', '.join(OPTIMIZER_NAMES)} or the path of a class, such as torch.optim.RMSprop"
        raise _make_error(config, "optimizer.name", remedy)
    for name in ("beta1", "beta2", "eps", "weight_decay"):  # defaults are accepted: a resolved config.yaml has them
        if getattr(optimizer, name) != getattr(defaults, name):
            remedy = f"applies to {', '.join(OPTIMIZER_NAMES)} only; put it in optimizer.args as the class names it"
            raise _make_error(config, f"optimizer.{name}", remedy)
    if "lr" in optimizer.args:
        raise _make_error(config, "optimizer.args", "the schedule sets the learning rate; give lr as optimizer.lr")


def _check_parameter_groups(config: Config) -> None:
    if not all(group.pattern for group in config.optimizer.groups):
        raise _make_error(config, "optimizer.groups", "every group needs a pattern of parameter names")


def _check_lora(config: Config) -> None:
    lora = config.lora
    if not lora.rank:
        return
    all_targets = LoraConfig().target_modules
    if not lora.target_modules or not set(lora.target_modules) <= set(all_targets):
        raise _make_error(config, "lora.target_modules", f"choose from {', '.join(all_targets)}")


def _check_parallel(config: Config) -> None:
    p = config.parallel
    if max([p.zero, *(config.auto_choices.get("parallel.zero") or ())]) > 3:
        raise _make_error(config, "parallel.zero", "must be one of the stages 0, 1, 2 and 3")
    keeps_all = p.activation_checkpointing == "none" and "parallel.activation_checkpointing" not in config.auto_choices
    if p.recompute_layers and keeps_all:
        remedy = "parallel.activation_checkpointing=none recomputes no layer; set it to selective, full or auto"
        raise _make_error(config, "parallel.recompute_layers", remedy)
    if p.offload != "none" and config.optimizer.name == "sgd":
        raise _make_error(config, "parallel.offload", "optimizer.name=sgd keeps no state to offload; use none")
    if "\0" in p.offload_dir or (p.offload == "disk" and not p.offload_dir):
        raise _make_error(config, "parallel.offload_dir", "parallel.offload=disk needs a directory on a local disk")


def _check_cluster(config: Config) -> None:
    workers, min_workers, max_workers = (
        getattr(config.cluster, name) for name in ("workers", "min_workers", "max_workers")
    )
    if AUTO not in (workers, min_workers) and int(min_workers) > max(1, int(workers)):
        raise _make_error(config, "cluster.min_workers", f"must not exceed cluster.workers={workers}")
    for name, value in (("workers", workers), ("min_workers", min_workers)):
        if max_workers not in (AUTO, 0) and value != AUTO and value > max_workers:
            raise _make_error(config, "cluster.max_workers", f"must be at least cluster.{name}={value}")
    url = config.cluster.preemption_url
    if url and not url.startswith(("http://", "https://")):
        raise _make_error(config, "cluster.preemption_url", "needs an address that begins with http:// or https://")
    path = config.cluster.preemption_file
    if path and path[0] not in "/~$":
        remedy = "needs an absolute path; it may begin with ~ or $VARIABLE, as they are on each node"
        raise _make_error(config, "cluster.preemption_file", remedy)


def _check_checkpoint(config: Config) -> None:
    checkpoint = config.checkpoint
    interval, upload_interval, path = checkpoint.interval, checkpoint.upload_interval, checkpoint.local_dir
    if path and path[0] not in "/~$":
        remedy = "needs an absolute path; it may begin with ~ or $VARIABLE, as they are on each node"
        raise _make_error(config, "checkpoint.local_dir", remedy)
    if upload_interval == AUTO:
        return
    if not path:
        remedy = "needs checkpoint.local_dir, which holds the checkpoints in between; set it, or set this to auto"
        raise _make_error(config, "checkpoint.upload_interval", remedy)
    if interval in (AUTO, 0):
        remedy = f"needs checkpoint.interval as a number of steps that divides it, not {interval}; or set this to auto"
        raise _make_error(config, "checkpoint.upload_interval", remedy)
    if int(upload_interval) % int(interval):
        multiple = -(-int(upload_interval) // int(interval)) * int(interval)
        remedy = f"must be a multiple of checkpoint.interval={interval}; {multiple} would"
        raise _make_error(config, "checkpoint.upload_interval", remedy)


def _check_fault(config: Config) -> None:
    if config.fault.audit_interval and config.train.deterministic != "elastic":
        remedy = "needs train.deterministic=elastic, with which a microbatch has the same bits on every rank"
        raise _make_error(config, "fault.audit_interval", remedy)
    workers = config.cluster.workers
    for fault in config.fault.inject:
        is_bit_flip = fault.kind.startswith("bitflip")
        if workers == 0 and not is_bit_flip and fault.kind not in ("nan", "exception"):
            remedy = "cluster.workers=0 runs in one process, which would die; use workers"
            raise _make_error(config, "fault.inject", remedy)
        if (fault.bit or fault.persistent) and not is_bit_flip:
            remedy = f"bit and persistent are of the kinds bitflip_*; leave them out of {fault.kind}"
            raise _make_error(config, "fault.inject", remedy)


def _check_profiler(config: Config) -> None:
    steps = config.profiler.steps
    if len(steps) != 2 or steps[0] >= steps[1] or steps[0] < 0:
        raise _make_error(config, "profiler.steps", "needs [first, end] with first < end")


_RULES = (
    _check_run,
    _check_model,
    _check_data,
    _check_train,
    _check_optimizer,
    _check_optimizer_name,
    _check_moment_dtype,
    _check_parameter_groups,
    _check_lora,
    _check_parallel,
    _check_cluster,
    _check_checkpoint,
    _check_fault,
    _check_profiler,
)


def _find_nearest_divisor(number: int, target: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - target), d))
