"""Shared fixtures (warm worker processes, one Ray cluster per session) and the distribution of tests over processes.

With `pytest -n 3` (pytest-xdist), one process runs all tests that start Ray or measure time, one after another. The
others run the remaining tests, file by file, at a lower CPU priority. Two of them: tests wait a lot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.extended_cases import is_extended
from tests.warm_pool import PRELOADED_MODULES, WarmPool
from tests.warm_ray_workers import WarmRayWorkers, use_python

COLLECTED = pytest.StashKey[list[tuple[str, str]]]()  # file and name of each test, before any is deselected
OBJECT_STORE_BYTES = 256 << 20  # small enough for a test to fill
if TYPE_CHECKING:
    from raytrain_hpc.storage.object_path import ObjectPath
    from tests.driver.cli_process import CliRunner
    from tests.storage.s3_server import S3Server
    from tests.training.elastic_runs import RunOnce

MODEL_MODULES = ["transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"]
SERIAL_TESTS = {  # files with tests that start Ray or measure time
    "test_ray_private",
    "callbacks/test_callbacks_on_a_cluster",
    "cli/test_wrong_inputs",
    "data/loader/test_exactly_once",
    "data/preprocess/test_executors",
    "data/samples/test_samples_on_a_cluster",
    "driver/test_cluster_address",
    "driver/test_network_partition",
    "driver/test_ray_metrics",
    "cli/test_autotune",
    "driver/test_ray_placement",
    "driver/test_cluster_probe",
    "driver/test_compiled_recovery",
    "driver/test_growing_cluster",
    "driver/test_shared_cluster",
    "driver/test_trial_slots",
    "driver/test_ray_data",
    "driver/test_lost_processes",
    "driver/test_busy_ranks",
    "driver/test_corruption_recovery",
    "driver/test_ray_faults",
    "driver/test_ray_interruption",
    "driver/test_spare_audits",
    "driver/test_storage_outage",
    "driver/test_nodes_without_a_common_directory",
    "driver/test_two_nodes",
    "driver/test_local_tier",
    "examples/test_attached_loop",
    "examples/test_custom_module",
    "examples/test_elastic_scripts",
    "examples/test_examples",
    "examples/test_script_callbacks",
    "examples/test_sharded_scripts",
    "examples/test_training_at_scale",
    "huggingface/test_transformers_on_a_cluster",
    "jobs/test_job_submit",
    "optim/test_optimizers_on_a_cluster",
    "distributed/test_abort",
    "runtime/test_heartbeat",
}
QUICK_TESTS = {  # files of `pytest -m quick`: some of every package, without Ray; few processes, and one fault
    "architecture/test_structure",
    "callbacks/test_callback_list",
    "checkpoint/test_lease",
    "checkpoint/test_shard_io",
    "cli/test_discovery",
    "cli/test_plan",
    "config/test_config",
    "config/test_loading",
    "config/test_model_spec",
    "data/dataset/test_manifest",
    "data/loader/test_packing",
    "data/loader/test_sampler",
    "data/tokenizer/test_tokenizers",
    "dcp/test_metadata_reader",
    "distributed/test_network_interface",
    "docs/test_references",
    "devices/test_device_backends",
    "driver/test_auto_layout",
    "driver/test_membership_planner",
    "driver/test_run_directory",
    "elastic/test_deadline",
    "elastic/test_recovery",
    "elastic/test_watchdog",
    "jobs/test_cluster_files",
    "model/test_decoder",
    "model/test_random_bits",
    "observability/test_console",
    "optim/test_lr_scheduler",
    "parallel/test_comm_volume",
    "planner/test_placement",
    "planner/test_search",
    "run_report/test_charts",
    "snapshot/test_memory_store",
    "state/test_reshard",
    "state/test_shard_index",
    "sweeps/test_median_rule",
    "sweeps/test_parameter",
    "training/test_checkpoint_interval",
    "training/test_memory_recovery",
    "storage/test_location",
}

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small, and the processes of the tests share the cores
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")  # scalar code: to find the CPU's vectors takes the compiler 10 s
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default gives workers the lowest priority


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--extended", action="store_true", help="also run the cases of tests/extended_cases.py")
    parser.addoption("--pool-device", choices=("cpu", "cuda"), default="cpu", help="device of the ranks in `pool`")


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[WarmPool]:
    """A pool of ranks without Ray: on gloo, or with --pool-device=cuda on NCCL, all of them on the first GPU."""
    warm_pool = WarmPool(device=pytestconfig.getoption("pool_device"))
    yield warm_pool
    warm_pool.close()


@pytest.fixture(scope="session")
def run_once(pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> RunOnce:
    """A function as `elastic_runs.run_bits`, which trains with the same settings only once per session."""
    from tests.training.elastic_runs import run_bits

    return cache(lambda *words: run_bits(pool, tmp_path_factory.mktemp("once"), *words))


@pytest.fixture(scope="session")
def cli() -> Iterator[CliRunner]:
    """A runner of the command line and of scripts."""
    from tests.driver.cli_process import CliRunner

    runner = CliRunner()
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def ray_python() -> Iterator[Path]:
    """The Python for a Ray whose workers are forked from a warm process; see `warm_ray_workers`."""
    workers = WarmRayWorkers([*PRELOADED_MODULES, *MODEL_MODULES])
    yield workers.python
    workers.close()


@pytest.fixture(scope="session")
def ray_cluster(ray_python: Path) -> Iterator[None]:
    """A local Ray cluster for all tests that need one; runs connect to it and leave it running."""
    import ray

    from raytrain_hpc.ray_private import stop_unused_daemons

    with use_python(ray_python):
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )
    stop_unused_daemons()
    yield
    ray.shutdown()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick`, import only the files that it runs."""
    if config.option.markexpr != "quick" or not collection_path.name.startswith("test_"):
        return None
    name = collection_path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
    return None if name in QUICK_TESTS else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = [(_get_file(item.nodeid), item.name) for item in items]
    is_named = any("::" in argument for argument in config.args)
    if not config.option.extended and not is_named:
        extended = [item for item in items if is_extended(_get_file(item.nodeid), item.name)]
        config.hook.pytest_deselected(items=extended)
        items[:] = [item for item in items if item not in set(extended)]
    items.sort(key=lambda item: not _is_serial(item.nodeid))  # the longest first
    for item in items:
        if _get_file(item.nodeid) in QUICK_TESTS:
            item.add_marker("quick")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "serial" if _is_serial(nodeid) else nodeid.split("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ or _is_serial(item.nodeid):
        return
    assert not {"ray_cluster", "ray_python"} & set(getattr(item, "fixturenames", ())), (
        "a file that starts Ray must be listed in SERIAL_TESTS"
    )
    if os.nice(0) < 10:
        os.nice(10)


def _is_serial(nodeid: str) -> bool:
    return _get_file(nodeid) in SERIAL_TESTS


def _get_file(nodeid: str) -> str:
    return nodeid.split("::")[0].removeprefix("tests/").removesuffix(".py")


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[S3Server]:
    from tests.storage.s3_server import S3Server

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An S3 server with an empty bucket, and the environment variables to reach it."""
    for name, value in _s3_server.environment.items():
        monkeypatch.setenv(name, value)
    _s3_server.clear()
    return _s3_server


@pytest.fixture
def folder(s3: S3Server) -> ObjectPath:
    """An empty prefix of the server's bucket."""
    from raytrain_hpc.storage.object_path import ObjectPath
    from tests.storage.bucket import BUCKET

    return ObjectPath.from_url(f"s3://{BUCKET}/runs/demo")
