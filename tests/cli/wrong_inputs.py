"""Wrong inputs and the error of the command line for each. `python -m tests.cli.wrong_inputs` prints the table."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from raytrain_hpc.cli.main import main as command_line

TRAIN = (
    "train run.dir={dir}/new data.path={dir}/chars model.hidden_size=32 model.num_layers=1 model.num_heads=4 "
    "train.steps=2 lr_scheduler.warmup_steps=1 train.seq_len=16 train.global_batch_size=12 cluster.workers=0 "
    "logging.tensorboard=false logging.sample_tokens=0"
)


@dataclass(frozen=True)
class Wrong:
    """A command line ({dir}: the test directory), and the parts of its one-line error: the cause and the remedy."""

    case: str
    argv: str
    expected: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    without: str = ""  # a package to hide
    alone: bool = False  # run in a new process only, where no Ray of the tests is running


def train(case: str, words: str, *expected: str, **more: object) -> Wrong:
    return Wrong(case, f"{TRAIN} {words}", expected, **more)  # type: ignore[arg-type]


# Former keys, and names of other trainers with any section or none -> the suggestion.
FORMER_AND_FOREIGN = {
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
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "max_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size",
    "train_batch_size": "train.global_batch_size",
    "max_grad_norm": "train.max_grad_norm",
    "clip_grad": "train.max_grad_norm",
    "bf16": "train.dtype=bf16",
    "fp8": "train.dtype=float8",
    "precision": "train.dtype",
    "mixed_precision": "train.dtype",
    "gradient_checkpointing": "parallel.activation_checkpointing=full",
    "activation_checkpoint": "parallel.activation_checkpointing",
    "activation_offloading": "parallel.activation_offload=cpu",
    "recompute_granularity": "parallel.activation_checkpointing",
    "recompute_num_layers": "parallel.recompute_layers",
    "fsdp": "parallel.zero=3",
    "sharding_strategy": "parallel.zero",
    "tensor_parallel_size": "parallel.tp",
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "expert_parallel_size": "parallel.ep",
    "num_nodes": "cluster.workers",
    "devices": "cluster.workers",
    "nproc_per_node": "cluster.workers",
    "world_size": "cluster.workers",
    "output_dir": "run.dir",
    "save_steps": "checkpoint.interval",
    "save_interval": "checkpoint.interval",
    "logging_steps": "logging.interval",
    "log_interval": "logging.interval",
    "eval_steps": "eval.interval",
    "warmup_ratio": "lr_scheduler.warmup_steps",
    "lr_scheduler_type": "lr_scheduler.name",
    "n_layer": "model.num_layers",
    "n_head": "model.num_heads",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "dim": "model.hidden_size",
    "num_hidden_layers": "model.num_layers",
    "num_attention_heads": "model.num_heads",
    "intermediate_size": "model.ffn_size",
    "max_seq_len": "train.seq_len",
    "block_size": "train.seq_len",
    "context_length": "train.seq_len",
    "use_wandb": "logging.wandb_project",
    "resume_from_checkpoint": "run.dir",
}

WRONG = [
    *(
        train(f"name {name}", f"{name}=1", f"{name}=1", f"did you mean {key}")
        for name, key in FORMER_AND_FOREIGN.items()
    ),
    train("foreign name in a section", "training.max_steps=1", "training.max_steps=1", "did you mean train.steps?"),
    train("key given twice", "{dir}/twice.yaml", "train.steps", "{dir}/twice.yaml:4", "lines 2 and 4"),
    train("switch for a name", "logging.wandb_project=true", "logging.wandb_project", "needs text"),
    train("unknown recipe", "llama3_8c", "llama3_8c", "did you mean the recipe llama3_8b?"),
    Wrong("option for a setting", "train --steps 10", ("--steps", "write train.steps=10")),
    Wrong("unknown key to explain", "config train.stepz", ("train.stepz", "did you mean train.steps?")),
    Wrong("unknown recipe to show", "recipes llama3", ("recipe='llama3'", "did you mean llama3_")),
    train("unknown key", "model.hiden_size=64", "model.hiden_size=64", "did you mean model.hidden_size?"),
    train("key of another section", "optim.lr=1", "optim.lr", "did you mean optimizer.lr?"),
    train("wrong type", "optimizer.lr=fast", "optimizer.lr='fast'", "needs a number"),
    train("fraction for a count", "train.steps=1.5", "train.steps=1.5", "needs a whole number"),
    train("out of range", "train.steps=-1", "train.steps=-1", "needs at least 0"),
    train(
        "not a choice",
        "lr_scheduler.name=cosin",
        "lr_scheduler.name",
        "one of cosine, linear, polynomial, inverse_sqrt, wsd, constant",
    ),
    train("section as key", "model=3", "model=3", "set model.KEY"),
    train("no value", "optimizer.lr=", "optimizer.lr", "needs a number"),
    train("reference to nothing", "run.name=${{nope}}", "run.name='${nope}'", "not found"),
    train("unknown preset", "model.preset=gpt2_125m", "model.preset", "did you mean gpt2_124m?"),
    train("two config files", "a.yaml b.yaml", "b.yaml", "one config file at a time"),
    train("missing config file", "{dir}/nowhere.yaml", "{dir}/nowhere.yaml", "No such file"),
    train("config is a directory", "{dir}/chars", "{dir}/chars", "Is a directory"),
    train("invalid YAML", "{dir}/broken.yaml", "{dir}/broken.yaml", "not valid YAML", "line 3"),
    train("YAML of another shape", "{dir}/list.yaml", "{dir}/list.yaml", "mapping of sections"),
    train("Python in YAML", "{dir}/python.yaml", "{dir}/python.yaml:2", "not a plain YAML value"),
    train(
        "unknown key in a file", "{dir}/slip.yaml", "train.stepz=5", "{dir}/slip.yaml:2", "did you mean train.steps?"
    ),
    train("circular base", "{dir}/egg.yaml", "base=", "break the circle"),
    train("batch that does not divide", "train.micro_batch_size=5", "train.micro_batch_size=5", "4 would"),
    train("heads that do not divide", "model.num_heads=5", "model.num_heads=5", "must divide model.hidden_size=32"),
    train("more stages than layers", "parallel.pp=2 cluster.workers=auto", "parallel.pp=2", "there are 1 layers"),
    train("experts on too many ranks", "parallel.ep=2 cluster.workers=2", "parallel.ep=2", "there are 0 experts"),
    train(
        "a microbatch count",
        "parallel.pp=2 parallel.pp_schedule=interleaved_1f1b cluster.workers=2 model.num_layers=4"
        " train.global_batch_size=5 train.micro_batch_size=1",
        "train.micro_batch_size=1",
        "2 equal rounds",
    ),
    train("more than there are", "cluster.min_workers=3 cluster.workers=2", "cluster.min_workers=3", "must not exceed"),
    train("an unknown fault", "'fault.inject=[{{kind: flood}}]'", "fault.inject", "flood"),
    train("a fault for nobody", "cluster.workers=0 'fault.inject=[{{kind: stop}}]'", "fault.inject", "one process"),
    train("quantized without ZeRO", "parallel.quantize=both", "parallel.quantize", "needs parallel.zero=1, 2 or 3"),
    train("more ranks than heads", "parallel.tp=8 cluster.workers=8", "parallel.tp=8", "4 attention heads"),
    train("sequence too short", "parallel.cp=4 cluster.workers=4 train.seq_len=7", "parallel.cp=4", "at least 8"),
    train("shards of nothing", "parallel.dp_shard=2 cluster.workers=2", "parallel.dp_shard=2", "set parallel.zero to"),
    train("layers without recomputation", "parallel.recompute_layers=2", "parallel.recompute_layers=2", "full or auto"),
    train("no such ZeRO stage", "parallel.zero=5", "parallel.zero=5", "stages 0, 1, 2 and 3"),
    train(
        "axes that miss the workers",
        "parallel.dp_replicate=2 cluster.workers=3",
        "cluster.workers=3",
        "set cluster.workers=2",
    ),
    train(
        "more workers than microbatches",
        "train.micro_batch_size=4 cluster.workers=4",
        "train.micro_batch_size=4",
        "use at most 3 workers",
    ),
    train("more workers than sequences", "cluster.workers=13", "train.global_batch_size=12", "at least 13 sequences"),
    train("a profiler not installed", "profiler.name=pyinstrument", "pip install", without="pyinstrument"),
    train("no GPU here", "cluster.device=cuda", "cluster.device=cuda", "use cluster.device=cpu"),
    train(
        "missing dataset",
        "data.path={dir}/nowhere",
        "data.path='{dir}/nowhere' (command line): no such directory",
        "`raytrain-hpc prepare TEXT --out {dir}/nowhere`",
    ),
    train(
        "no dataset there",
        "data.path={dir}/folder",
        "data.path='{dir}/folder' (command line): not a prepared dataset",
        "`raytrain-hpc prepare {dir}/folder --out {dir}/folder-tokens`",
    ),
    train(
        "text instead of a dataset",
        "data.path={dir}/text.txt",
        "data.path='{dir}/text.txt'",
        "`raytrain-hpc prepare {dir}/text.txt --out {dir}/text-tokens`",
    ),
    train("key without a value", "train.steps", "train.steps='' (command line)", "write train.steps=VALUE"),
    train("key and value as two words", "train.steps 10", "train.steps=''", "write train.steps=10"),
    Wrong(
        "recipe whose data are missing",
        "train shakespeare_char cluster.workers=0 run.dir={dir}/new",
        (
            "data.path='data/shakespeare_char' (recipe shakespeare_char:",
            "`raytrain-hpc recipes shakespeare_char` shows",
        ),
    ),
    train("two kinds of data", "'data.sources=[{{path: x}}]'", "data.path", "not both"),
    train("weights that sum to zero", "data.path=stdlib 'data.sources=[{{path: a, weight: 0}}]'", "above 0"),
    train("negative weight", "data.path=stdlib 'data.sources=[{{path: a, weight: -1}}]'", "at least 0"),
    train("stages of no mixture", "'data.stages=[{{from_tokens: 9}}]'", "data.stages", "they need data.sources"),
    train(
        "a stage without weights",
        "data.path=stdlib 'data.sources=[{{path: a}}]' 'data.stages=[{{from_tokens: 9}}]'",
        "data.stages",
        "needs 1 weights",
    ),
    train("unknown packing", "data.packing=best", "data.packing", "one of stream, documents, padded"),
    train(
        "synthetic documents", "data.path=synthetic data.packing=padded", "packing=padded", "use data.packing=stream"
    ),
    train("misspelt source", "'data.sources=[{{pat: x}}]'", "data.sources", "like [{path: DIR, weight: 1}]"),
    train("flipped byte in a shard", "data.path={dir}/flipped", "{dir}/flipped/train-00000.arrow", "prepare the"),
    train("truncated shard", "data.path={dir}/truncated", "{dir}/truncated/train-00000.arrow", "prepare the"),
    train("missing shard", "data.path={dir}/missing", "{dir}/missing/train-00000.arrow", "missing", "prepare the"),
    train("damaged dataset manifest", "data.path={dir}/garbled", "{dir}/garbled/manifest.json", "prepare the"),
    train("dataset shorter than a window", "train.seq_len=4096", "train.seq_len", "4096"),
    train("vocabulary below the dataset's", "model.vocab_size=3", "model.vocab_size=3", "or auto"),
    train("checkpoint of another model", "run.dir={dir}/done model.hidden_size=64", "{dir}/done", "another run.dir"),
    train("checkpoint of another seed", "run.dir={dir}/done run.seed=1", "{dir}/done", "another run.dir"),
    train(
        "checkpoint of other data",
        "run.dir={dir}/done data.path={dir}/other",
        "data.path='{dir}/other'",
        "{dir}/done",
        "other data",
    ),
    train(
        "another learning rate",
        "run.dir={dir}/done optimizer.lr=0.5",
        "optimizer.lr=0.5",
        "trained with 0.003",
        "another run.dir",
    ),
    train(
        "fewer steps than trained", "run.dir={dir}/done train.steps=0", "train.steps=0", "is at step", "another run.dir"
    ),
    train(
        "another batch",
        "run.dir={dir}/done train.global_batch_size=8",
        "train.global_batch_size=8",
        "was trained with 12",
    ),
    train("only damaged checkpoints", "run.dir={dir}/damaged", "{dir}/damaged", "remove them to start over"),
    train("run there already", "run.dir={dir}/done run.resume=never", "{dir}/done", "choose another run.dir"),
    train("second driver", "run.dir={dir}/held", "{dir}/held", "another driver", "choose another run.dir"),
    train("run.dir is a file", "run.dir={dir}/text.txt", "{dir}/text.txt", "File exists", "another run.dir"),
    train("run.dir below a file", "run.dir={dir}/text.txt/run", "Not a directory", "another run.dir"),
    train("run.dir not writable", "run.dir=/proc/none/run", "/proc/none/run", "another run.dir"),
    train("deadline of no form", "run.deadline=soon", "run.deadline='soon' (command line)", "3h30m", "auto or none"),
    train("deadline that has passed", "run.deadline=2020-01-01T08:00", "has passed", "give a later time"),
    train("date that does not exist", "run.name=x train.steps=2026-13-01", "train.steps", "not a YAML value"),
    train("run.dir empty", "run.dir=", "run.dir=''", "needs a directory"),
    train(
        "no Ray at the address",
        "cluster.workers=2 cluster.address=127.0.0.1:1",
        "cluster.address=127.0.0.1:1 (command line)",
        "ray start --head",
        alone=True,
    ),
    train(
        "RAY_ADDRESS wrong",
        "cluster.workers=2",
        "cluster.address=127.0.0.1:1 (RAY_ADDRESS)",
        "ray start --head",
        env={"RAY_ADDRESS": "127.0.0.1:1"},
        alone=True,
    ),
    train(
        "address of a dashboard",
        "cluster.workers=2 cluster.address=http://127.0.0.1:8265",
        "cluster.address=http://127.0.0.1:8265 (command line)",
        "not of the form host:port",
        alone=True,
    ),
    train(
        "unknown network interface",
        "cluster.workers=2 cluster.address=local cluster.network_interface=ib7",
        "cluster.network_interface='ib7' (command line)",
        "has no interface 'ib7'",
        "with an IP address; it has ",
        alone=True,
    ),
    train(
        "path too long for Ray's sockets",
        "cluster.workers=2 cluster.address=local",
        "bytes, at most 107 are possible",
        "set RAY_TMPDIR",
        env={"RAY_TMPDIR": f"/tmp/{'x' * 60}"},
        alone=True,
    ),
    train(
        "one of several that a launcher started",
        "cluster.workers=1",
        "this is task 3 of 8 of srun",
        "cluster.address",
        env={"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3"},
        alone=True,
    ),
    Wrong("no config at all", "plan {dir}/nowhere.yaml", ("{dir}/nowhere.yaml", "No such file")),
    Wrong(
        "plan of too many workers",
        "plan train.global_batch_size=4 --workers 5",
        ("train.global_batch_size=4", "5 sequences"),
    ),
    Wrong(
        "sweep: range in a grid",
        "sweep run.dir={dir}/new --over optimizer.lr=1e-4..1e-2",
        ("--over='optimizer.lr=0.0001..0.01' (sweep)", "add --search random or --search tpe"),
    ),
    Wrong(
        "sweep: unknown metric",
        "sweep run.dir={dir}/new --over optimizer.lr=1e-4,1e-2 --metric validation/loss",
        ("--metric='validation/loss'", "did you mean val"),
    ),
    Wrong(
        "sweep: optuna not installed",
        "sweep run.dir={dir}/new --over optimizer.lr=1e-4..1e-2 --search tpe",
        ("--search tpe", "pip install optuna"),
        without="optuna",
    ),
    Wrong("prepare: missing input", "prepare {dir}/nowhere.txt --out {dir}/o", ("{dir}/nowhere.txt", "no such file")),
    Wrong("prepare: empty file", "prepare {dir}/empty.txt --out {dir}/o", ("{dir}/empty.txt", "empty")),
    Wrong("prepare: empty folder", "prepare {dir}/folder --out {dir}/o", ("{dir}/folder", "no files")),
    Wrong("prepare: tokenizer", "prepare {dir}/text.txt --out {dir}/o --tokenizer bpe", ("'bpe'", "byte, char")),
    Wrong(
        "prepare: not UTF-8",
        "prepare {dir}/latin1.txt --out {dir}/o --tokenizer char",
        ("{dir}/latin1.txt", "byte 3 is not UTF-8", "tokenizer byte"),
    ),
    Wrong(
        "prepare: binary file in a folder",
        "prepare {dir}/mixed --out {dir}/o",
        ("{dir}/mixed/logo.png", "byte 8 is NUL", "leave it out"),
    ),
    Wrong(
        "prepare: missing field",
        "prepare {dir}/rows.jsonl --out {dir}/o --field body",
        ("{dir}/rows.jsonl: line 2", "no field 'body'", "'text'"),
    ),
    Wrong(
        "prepare: tokenizers not installed",
        "prepare {dir}/text.txt --out {dir}/o --tokenizer bpe:300",
        ("pip install tokenizers",),
        without="tokenizers",
    ),
    Wrong(
        "prepare: no Ray at the address",
        "prepare {dir}/text.txt --out {dir}/o --address 127.0.0.1:1",
        ("address=127.0.0.1:1", "nothing answers there"),
        alone=True,
    ),
    Wrong(
        "doctor: no Ray at the address",
        "doctor cluster.address=127.0.0.1:1",
        ("cluster.address=127.0.0.1:1", "nothing answers there"),
        alone=True,
    ),
    Wrong("prepare: fraction", "prepare {dir}/text.txt --out {dir}/o --val-fraction 1.5", ("1.5", "below 1")),
    Wrong("prepare: onto a file", "prepare {dir}/text.txt --out {dir}/list.yaml", ("{dir}/list.yaml", "another")),
    Wrong("prepare: onto others", "prepare {dir}/text.txt --out {dir}/chars", ("{dir}/chars", "choose another")),
    Wrong("inspect: no dataset", "inspect {dir}/folder", ("{dir}/folder", "raytrain-hpc prepare")),
    Wrong("inspect: damaged", "inspect {dir}/flipped", ("{dir}/flipped/train-00000.arrow", "prepare the")),
    Wrong("generate: no run", "generate {dir}/nowhere", ("{dir}/nowhere", "no such run directory")),
    Wrong("generate: no checkpoint", "generate {dir}/damaged", ("{dir}/damaged", "train first")),
    Wrong(
        "generate: no such step", "generate {dir}/done --step 7", ("step=7: {dir}/done", "no checkpoint", "steps: 2")
    ),
    Wrong("status: no run", "status {dir}/nowhere", ("{dir}/nowhere: no such run directory", "run.dir of a run")),
    Wrong("status: dataset", "status {dir}/chars", ("{dir}/chars: no run directory", "run.dir of a run")),
    Wrong("status: sweep", "status {dir}/swept", ("{dir}/swept: a sweep", "run directories of its trials")),
    Wrong("generate: sweep", "generate {dir}/swept", ("{dir}/swept: a sweep", "run directories of its trials")),
    Wrong("report: sweep", "report {dir}/swept", ("{dir}/swept: a sweep", "run directories of its trials")),
    Wrong("generate: unknown character", "generate {dir}/done --prompt §", ("'§'", "only characters of the training")),
    Wrong("generate: damaged tokenizer", "generate {dir}/lost", ("{dir}/lost/tokenizer.json", "cannot be read")),
]


@dataclass(frozen=True)
class CommandResult:
    code: int
    errors: list[str]  # lines on stderr
    seconds: float


def build_inputs(root: Path) -> None:
    """Create the inputs of all cases: datasets, damaged copies, run directories, YAML files."""
    from raytrain_hpc.checkpoint.lease import Lease
    from raytrain_hpc.data.preprocess.prepare import prepare

    text = "the quick brown fox jumps over the lazy dog. " * 40
    (root / "text.txt").write_text(text)
    (root / "other.txt").write_text(text[::-1])
    (root / "latin1.txt").write_bytes("café".encode("latin-1"))
    (root / "empty.txt").write_text("")
    (root / "rows.jsonl").write_text('{"body": "one"}\n{"text": "two"}\n')
    (root / "folder").mkdir()
    (root / "swept").mkdir()
    (root / "swept" / "sweep.json").write_text("{}")
    (root / "mixed").mkdir()
    (root / "mixed" / "a.txt").write_text(text)
    (root / "mixed" / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (root / "broken.yaml").write_text("train:\n  steps: 5\n lr: 1\n")
    (root / "list.yaml").write_text("- 1\n")
    (root / "python.yaml").write_text("run:\n  name: !!python/object/apply:os.getcwd []\n")
    (root / "slip.yaml").write_text("train:\n  stepz: 5\n")
    (root / "twice.yaml").write_text("train:\n  steps: 5\n  seq_len: 8\n  steps: 6\n")
    (root / "egg.yaml").write_text("base: hen.yaml\n")
    (root / "hen.yaml").write_text("base: egg.yaml\n")
    prepare([root / "text.txt"], root / "chars", tokenizer="char")
    prepare([root / "other.txt"], root / "other", tokenizer="char")
    for name in ("flipped", "truncated", "missing", "garbled"):
        shutil.copytree(root / "chars", root / name)
    flip_byte(root / "flipped" / "train-00000.arrow")
    os.truncate(root / "truncated" / "train-00000.arrow", 64)
    (root / "missing" / "train-00000.arrow").unlink()
    (root / "garbled" / "manifest.json").write_text("{")
    result = run_in_process(f"{TRAIN} run.dir={{dir}}/done", root)
    if result.code:
        raise RuntimeError(result.errors)
    for name in ("damaged", "lost"):
        shutil.copytree(root / "done", root / name)
    flip_byte(root / "damaged" / "checkpoints" / "step-00000002" / "rank-00000.safetensors")
    (root / "lost" / "tokenizer.json").write_text("{")
    Lease.acquire(root / "held", "first driver")


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def run_in_process(argv: str, root: Path) -> CommandResult:
    """Run a command line in this process."""
    stdout, stderr, began = io.StringIO(), io.StringIO(), time.process_time()
    code: object = None
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            command_line(split_command(argv, root))
        except SystemExit as ended:
            code = ended.code
    return CommandResult(int(str(code or 0)), stderr.getvalue().splitlines(), time.process_time() - began)


def run_in_new_process(wrong: Wrong, root: Path) -> CommandResult:
    """Run a command line in a new process and measure its CPU seconds."""
    blocked = f"import sys; sys.modules[{wrong.without!r}] = None; " if wrong.without else ""
    program = f"{blocked}from raytrain_hpc.cli.main import main; main()"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program, *split_command(wrong.argv, root)],
        env={**os.environ, **wrong.env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return CommandResult(done.returncode, done.stderr.splitlines(), seconds)


def split_command(argv: str, root: Path) -> list[str]:
    return [word.replace("{{", "{").replace("}}", "}") for word in shlex.split(argv.replace("{dir}", str(root)))]


def read_tree(root: Path) -> dict[str, bytes | None]:
    """Return every path below `root` with its content."""
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@contextlib.contextmanager
def hide_package(package: str) -> Iterator[None]:
    """Hide a package as if it were not installed."""
    if not package:
        yield
        return
    before = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        if before is not None:
            sys.modules[package] = before


def run_case(wrong: Wrong, root: Path) -> CommandResult:
    if wrong.alone:
        return run_in_new_process(wrong, root)
    with hide_package(wrong.without):
        return run_in_process(wrong.argv, root)


def main() -> None:
    """Print a table of case, stderr, exit code and seconds."""
    with tempfile.TemporaryDirectory(prefix="wrong-") as name:
        root = Path(name)
        build_inputs(root)
        print("| case | stderr | exit code | s |\n| --- | --- | --- | --- |")
        for wrong in WRONG:
            result = run_case(wrong, root)
            line = " / ".join(result.errors).replace(str(root), "DIR").replace("|", "\\|")
            print(f"| {wrong.case} | {line} | {result.code} | {result.seconds:.2f} |")


if __name__ == "__main__":
    main()
