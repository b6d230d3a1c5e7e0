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


WRONG = [
    train("unknown key", "model.hiden_size=64", "model.hiden_size=64", "did you mean model.hidden_size?"),
    train("key of another section", "optim.lr=1", "optim.lr", "did you mean optimizer.lr?"),
    train("wrong type", "optimizer.lr=fast", "optimizer.lr='fast'", "needs a number"),
    train("fraction for a count", "train.steps=1.5", "train.steps=1.5", "needs a whole number"),
    train("out of range", "train.steps=-1", "train.steps=-1", "needs at least 0"),
    train("not a choice", "lr_scheduler.name=cosin", "lr_scheduler.name", "one of cosine, wsd, constant"),
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
    train("compiler and a cut model", "parallel.tp=2 train.compile=true", "parallel.tp=2", "set train.compile=false"),
    train("sequence too short", "parallel.cp=4 cluster.workers=4 train.seq_len=7", "parallel.cp=4", "at least 8"),
    train("shards of nothing", "parallel.dp_shard=2 cluster.workers=2", "parallel.dp_shard=2", "set parallel.zero to"),
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
    train("missing dataset", "data.path={dir}/nowhere", "{dir}/nowhere", "raytrain-hpc prepare"),
    train("no dataset there", "data.path={dir}/folder", "{dir}/folder", "raytrain-hpc prepare"),
    train("text instead of a dataset", "data.path={dir}/text.txt", "{dir}/text.txt", "raytrain-hpc prepare"),
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
    train("synthetic documents", "data.path=synthetic data.packing=padded", "packing=padded", "use packing=stream"),
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
    (root / "mixed").mkdir()
    (root / "mixed" / "a.txt").write_text(text)
    (root / "mixed" / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (root / "broken.yaml").write_text("train:\n  steps: 5\n lr: 1\n")
    (root / "list.yaml").write_text("- 1\n")
    (root / "python.yaml").write_text("run:\n  name: !!python/object/apply:os.getcwd []\n")
    (root / "slip.yaml").write_text("train:\n  stepz: 5\n")
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
