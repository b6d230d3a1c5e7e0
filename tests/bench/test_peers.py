"""Peers of the benchmarks: their models are the platform's, all alternate with it, and what is missing is named."""

from __future__ import annotations

import json
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from raytrain_hpc.bench import device, interleave, peer_check, step, telemetry
from raytrain_hpc.bench.contenders import build_baseline_command, check_first_losses, read_jsonl, run_process
from raytrain_hpc.bench.interleave import TrainingProcess, alternate_with_each, launch_training
from raytrain_hpc.bench.peer_check import check_peers, parse_peers
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.torch_baseline import (
    build_model,
    build_optimizer,
    compute_loss,
    make_loss_function,
    train_step,
)
from raytrain_hpc.bench.workloads import build_baseline_job
from raytrain_hpc.cli.bench import bench
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import MissingDependencyError, ModelError, RunFailedError
from raytrain_hpc.observability.kernel_summary import ProfiledEvent, summarize_events
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

# Large weights, so that logits depend on every part of the model.
BASE = ("data.path=synthetic", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.vocab_size=64")
SHARP = (*BASE, "model.init_std=0.5", "train.seq_len=32", "train.global_batch_size=2", "train.micro_batch_size=2")
GPT2 = ("model.norm=layernorm", "model.activation=gelu", "model.position_embedding=learned", "model.bias=true")
MODELS = {
    "llama": ("model.num_kv_heads=2", "model.norm_eps=1e-3"),
    "llama, tied, scaled rope": ("model.tie_embeddings=true", "model.rope_factor=8", "model.rope_theta=500"),
    "qwen3": ("model.qk_norm=true", "model.head_dim=12"),
    "gpt2": GPT2,
}
TITAN = pytest.param("torchtitan", marks=pytest.mark.skipif(find_spec("torchtitan") is None, reason="not installed"))


def check_model(tmp_path: Path, peer: str, *words: str) -> None:
    """Compare loss and gradient norm of the embedding of a peer's model, in fp32, with the platform's model in fp64."""
    job = build_baseline_job(load_config(None, [*SHARP, *words]), 1, tmp_path, peer)
    windows = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(5))
    platform = build_model(replace(job, peer="plain")).double()
    results = []
    for model, loss_function in ((build_model(job), make_loss_function(job)), (platform, compute_loss)):
        loss = loss_function(model, windows)
        loss.backward()
        table = next(parameter for parameter in model.parameters() if parameter.shape == (64, 32))
        results.append((loss.item(), table.grad.norm().item()))
    (loss, norm), (reference_loss, reference_norm) = results
    assert loss == pytest.approx(reference_loss, rel=1e-6) and norm == pytest.approx(reference_norm, rel=5e-6)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_builds_the_platforms_model(tmp_path: Path, name: str) -> None:
    check_model(tmp_path, "transformers", *MODELS[name])


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("llama")])
def test_torchtitan_builds_the_platforms_model(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torchtitan")
    check_model(tmp_path, "torchtitan", *MODELS[name])


def test_a_model_that_a_library_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no supported model family"):
        check_model(tmp_path, "transformers", "model.norm=layernorm")


@pytest.mark.parametrize("peer", ["transformers", TITAN])
def test_peers_have_the_losses_of_the_platform(pool: WarmPool, tmp_path: Path, peer: str) -> None:
    """The optimizer, the tokens and their order are the same too. Another rotary base is found at the first step."""
    words = ["train.steps=3", "lr_scheduler.name=constant", "lr_scheduler.warmup_steps=0", "train.micro_batch_size=6"]
    config = make_small_config(tmp_path / "run", *words, "model.init_std=0.1")
    job = build_baseline_job(config, 1, tmp_path, peer)
    run_process(build_baseline_command(job, 1, tmp_path, tmp_path / "steps.jsonl"), {"OMP_NUM_THREADS": "1"})
    losses = [line["loss"] for line in read_jsonl(tmp_path / "steps.jsonl")]
    other = replace(job, shape=replace(job.shape, rope_theta=100.0))
    model, tokens = build_model(other), np.load(other.tokens)[: other.global_batch_size]
    other_loss = train_step(model, build_optimizer(model, other), tokens, other, make_loss_function(other))
    platform_losses = [metrics["train/loss"] for metrics in get_step_metrics(pool.train(config)[0])]
    check_first_losses(peer, losses, platform_losses, "fp32")
    assert losses == pytest.approx(platform_losses, abs=1e-4)
    with pytest.raises(RunFailedError, match=f"--against {peer}: .* not the same model"):
        check_first_losses(peer, [other_loss], platform_losses, "fp32")


def test_peers_are_parsed() -> None:
    assert parse_peers("step", ["nanogpt=a/b,transformers", "torchtitan"]) == {
        "nanogpt": Path("a/b"),
        "transformers": None,
        "torchtitan": None,
    }
    assert parse_peers("device", ["torchtitan"]) == {"torchtitan": None}


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["step", "--against", "nanogpt"], "takes nanogpt=DIR, transformers, torchtitan"),
        (["step", "--against", "transformers=x"], "takes nanogpt=DIR, transformers, torchtitan"),
        (["step", "--against", "transformers,megatron"], "--against megatron: `bench step` cannot use that"),
        (["device", "--against", "nanogpt=x"], "takes transformers, torchtitan"),
        (["data", "--against", "transformers"], "only `bench step`, `bench device` and `bench recovery` compare with"),
        (["device", "--out", "no/such/file.json"], "no/such is no directory"),
    ],
)
def test_a_peer_that_a_benchmark_does_not_know_is_refused(words: list[str], remedy: str) -> None:
    result = CliRunner().invoke(bench, words)
    assert result.exit_code == 2 and remedy in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (
            "raise ModuleNotFoundError('No module named X')",
            MissingDependencyError,
            r"named X\); run `pip install 'torch",
        ),
        ("", MissingDependencyError, r"cannot be imported \(ModuleNotFoundError: No module named 'torchtitan\."),
        ("raise RuntimeError('no driver')", RunFailedError, "its import failed: RuntimeError: no driver"),
    ],
)
def test_a_library_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "__init__.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(peer_check.__file__).parents[2]}")
    with pytest.raises(error, match=f"--against torchtitan: .*{message}"):
        check_peers(["torchtitan"])


@contextmanager
def launch_sleeper(directory: Path, name: str, step_s: float):  # type: ignore[no-untyped-def]
    """Start a process whose steps take `step_s`."""
    steps, pids = directory / f"{name}.jsonl", list[int]()
    code = f"import json, time\nwhile True:\n time.sleep({step_s})\n"
    code += f" open({str(steps)!r}, 'a').write(json.dumps({{'unix': time.time()}}) + chr(10))"
    command, output = [sys.executable, "-c", code], directory / f"{name}.out"
    read_times = lambda: [line["unix"] for line in read_jsonl(steps)]  # noqa: E731
    with launch_training(name, command, {}, output, read_times, lambda: pids) as process:
        pids.append(process.process.pid)
        yield process
        pids.clear()


def test_each_peer_alternates_with_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one process runs at a time, and ratios are those of the steps' lengths."""
    monkeypatch.setattr(interleave, "SHORTEST_TURN_S", 0.2)
    monkeypatch.setattr(interleave, "LONGEST_TURN_S", 0.4)
    lengths = {"first": 0.06, "second": 0.03, "platform": 0.02}
    with (
        launch_sleeper(tmp_path, "first", lengths["first"]) as first,
        launch_sleeper(tmp_path, "second", lengths["second"]) as second,
        launch_sleeper(tmp_path, "platform", lengths["platform"]) as platform,
    ):
        times = alternate_with_each([first, second], platform, pairs=3, warmup=1)
        turns = sorted(turn for process in (first, second, platform) for turn in process.turns)
        counts = [len(process.turns) for process in (first, second, platform)]
    assert counts == [4, 4, 8] and [len(pairs) for pairs in times] == [3, 3]
    assert all(end <= start for (_, end), (start, _) in zip(turns, turns[1:], strict=False))
    for name, pairs in zip(("first", "second"), times, strict=True):
        for peer_s, platform_s in pairs:
            assert peer_s >= lengths[name] and platform_s >= lengths["platform"]  # a busy machine only adds to them


def test_step_has_a_row_per_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The goals are those of the plain loop, and every peer is compared with the same run of the platform."""

    @contextmanager
    def launch(*arguments: object):  # type: ignore[no-untyped-def]
        peer = arguments[2] if len(arguments) > 1 else "platform"
        losses = {"plain": 9.0, "transformers": 9.0000009, "platform": 9.0}
        peaks = {"plain": 800.0, "transformers": 1200.0, "platform": 900.0}
        yield SimpleNamespace(read_peak_rss_mib=lambda: peaks[peer], read_losses=lambda: [losses[peer]])

    monkeypatch.setattr(step, "launch_torch_baseline", launch)
    monkeypatch.setattr(step, "launch_platform", launch)
    times = [[(1.0, 1.25)] * 3, [(2.0, 1.0)] * 3]
    monkeypatch.setattr(step, "alternate_with_each", lambda peers, *_: times)
    table = Table("x", step.COLUMNS)
    step._measure(step.Case("small", step.MEDIUM_SHORT, 1, 0.98), 1, "127.0.0.1:1", ("plain", "transformers"), table)
    plain, transformers = table.rows
    assert (plain["peer"], plain["ratio"], plain["goal"], plain["met"]) == ("plain", 0.8, 0.98, False)
    assert (plain["extra MiB"], plain["memory met"], plain["first loss off by"]) == (100.0, True, 0.0)
    assert (transformers["ratio"], transformers["met"], transformers["extra MiB"]) == (2.0, None, -300.0)
    assert transformers["memory met"] is None and transformers["first loss off by"] == pytest.approx(9e-7)
    assert plain["peer tok/s"] == 256 and transformers["platform tok/s"] == 256


def test_losses_of_unknown_weights_are_not_compared() -> None:
    unknown = TrainingProcess("x", None, Path(), list, list)  # type: ignore[arg-type]
    assert step.compare_first_losses("nanogpt", unknown, unknown) is None


def test_device_measures_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Operators, tokens per second and memory are there; what needs a GPU says so. The peer has the same first loss."""
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    words = (*BASE, "train.seq_len=32", "train.global_batch_size=2", "train.micro_batch_size=1", *device.FP32)
    monkeypatch.setattr(device, "CPU_CASES", (device.Case("tiny", words, with_peers=True),))
    monkeypatch.setattr(device, "STEPS_PER_ROUND", 3)
    out = tmp_path / "table.json"
    result = CliRunner().invoke(bench, ["device", "--rounds", "1", "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0 and "needs a GPU" in result.stdout
    platform, plain = json.loads(out.read_text())["rows"]
    for row in (platform, plain):
        assert row["tok/s"] > 0 and row["peak GiB"] > 0.1 and 0 < row["GEMM %"] < 100
        assert row["attention"].startswith("aten::_scaled_dot_product_flash_attention")
        assert {row[name] for name in ("MFU %", "MFU %, full square", "W", "SM MHz")} == {"needs a GPU"}
    assert plain["first loss"] == pytest.approx(platform["first loss"], rel=1e-6)


def test_rows_of_a_gpu_have_both_conventions_and_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """One H100 at 60,741 tokens/s of Llama 3.2 1B, as measured: FLOPs are counted here from the sizes of the model."""
    kernels = summarize_events(
        "cuda",
        [
            ProfiledEvent("nvjet_sm90_tst_256x128", 0, 70, 70),
            ProfiledEvent("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>(Flash_fwd_params)", 70, 100, 30),
        ],
    )
    measured = device.Measurement(60_741.0, 50.14, [11.8], kernels, telemetry.Telemetry(650.0, 1800.0, 60.0), 0.1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(device, "measure_platform", lambda *_: measured)
    monkeypatch.setattr(device, "measure_peer", lambda *_: replace(measured, telemetry=telemetry.Telemetry()))
    table = Table("x", device.COLUMNS)
    device.measure_case(device.GPU_CASES[0], 20, torch.device("cuda", 0), ["plain"], table)
    platform, plain = table.rows
    layers, width, kv, ffn, vocab, seq_len = 16, 2048, 512, 8192, 128256, 4096
    weights = layers * (2 * width * width + 2 * width * kv + 3 * width * ffn) + width * vocab
    for name, factor in (("MFU %", 6), ("MFU %, full square", 12)):
        flops = 6 * weights + factor * layers * width * seq_len
        assert platform[name] == plain[name] == pytest.approx(100 * 60_741 * flops / 989e12, rel=1e-3)
    assert platform["MFU %"] == pytest.approx(50.5, abs=0.1)
    assert (platform["W"], platform["SM MHz"], plain["W"], plain["SM MHz"]) == (650.0, 1800.0, "unknown", "unknown")
    assert platform["GEMM %"] == pytest.approx(70.0) and platform["attention"] == "pytorch_flash::flash_fwd_kernel"
    assert platform["met"] is True and platform["planned GiB"] == pytest.approx(50.14, rel=0.05)
    assert platform["expected tok/s"] == pytest.approx(60_741, rel=0.06) and plain["planned GiB"] is None


def test_power_and_clock_are_means_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    states, all_read = [(600.0, 1800.0, 50.0), (700.0, 1900.0, 60.0)], threading.Event()

    def read(device: torch.device) -> tuple[float, float, float] | None:
        if states:
            return states.pop()
        all_read.set()
        return None

    monkeypatch.setattr(telemetry, "read_gpu_state", read)
    monkeypatch.setattr(telemetry, "_INTERVAL_S", 0.001)
    with telemetry.sample_telemetry(torch.device("cuda", 0)) as sampled:
        assert all_read.wait(10)
    assert sampled.to_json() == {"power_w": 650.0, "sm_clock_mhz": 1850.0, "temperature_c": 55.0}


def test_the_state_of_a_gpu_is_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for pynvml; without it, or where the driver refuses, nothing is known."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 412_500)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1755)
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 61)
    monkeypatch.setattr(telemetry, "find_spec", lambda name: None)
    assert telemetry.read_gpu_state(gpu) is None
    pynvml = ModuleType("pynvml")
    pynvml.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setattr(telemetry, "find_spec", lambda name: pynvml)
    assert telemetry.read_gpu_state(gpu) == (412.5, 1755.0, 61.0)
    assert telemetry.read_gpu_state(torch.device("cpu")) is None

    def refuse(device: torch.device) -> int:
        raise pynvml.NVMLError("not supported")

    monkeypatch.setattr(torch.cuda, "clock_rate", refuse)
    assert telemetry.read_gpu_state(gpu) is None
