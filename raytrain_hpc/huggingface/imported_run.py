"""Writing an imported model as a run directory with a checkpoint at step 0, one tensor at a time.

OUT/config.yaml  OUT/tokenizer.json  OUT/checkpoints/step-00000000/   as in any run directory
OUT/huggingface/                                                      files that export copies unchanged
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from raytrain_hpc.checkpoint.manifest import get_shard_name
from raytrain_hpc.checkpoint.shard_io import write_slices
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.loader import Setting, build_config, config_to_yaml
from raytrain_hpc.config.model_spec import ModelSpec, spec_to_settings
from raytrain_hpc.data.tokenizer.base import Tokenizer
from raytrain_hpc.huggingface.atomic_dir import PASSTHROUGH_FILES
from raytrain_hpc.state.shard_index import ITEM_BYTES, TensorSlices

SHARD_BYTES = 1 << 30
IMPORTED_DIR = "huggingface"


@dataclass(frozen=True)
class ImportedTensor:
    """One box of a parameter, and the function that reads it when it is written: fp32 of the size of the box."""

    slices: TensorSlices
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return sum(box.numel for box in self.slices.boxes) * ITEM_BYTES[self.slices.dtype]


@dataclass(frozen=True)
class ImportedModel:
    """The architecture of an imported model, the positions it was trained for, and where both were read."""

    spec: ModelSpec
    max_positions: int
    origin: str


def write_imported_run(
    directory: Path,
    out: Path,
    model: ImportedModel,
    tensors: Sequence[ImportedTensor],
    *,
    imported_from: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.yaml and the checkpoint of step 0 into `directory`, which is renamed to `out` afterwards.

    `tensors` must cover every parameter once. A shard file holds at most `shard_bytes`, and at least one tensor. Raises
    CheckpointError if the tensors do not cover the model, and OSError if storage fails.
    """
    settings = spec_to_settings(model.spec) | {"max_positions": model.max_positions}
    config_settings = [Setting(f"model.{key}", value, model.origin) for key, value in settings.items()]
    config_settings += [Setting("run.name", out.name, ""), Setting("run.dir", str(out), "")]
    (directory / "config.yaml").write_text(config_to_yaml(build_config(config_settings)))
    store = CheckpointStore(directory / "checkpoints")
    staging, reports = store.create_staging(0, 0), []
    for number, group in enumerate(_group_into_shards(tensors, shard_bytes)):
        slices = [tensor.slices for tensor in group]
        reports.append(write_slices(staging / get_shard_name(number), slices, (tensor.read() for tensor in group)))
    meta = {
        "model": asdict(model.spec),
        "dtype": "fp32",
        "seq_len": model.max_positions,
        "positions": model.max_positions,
        "imported_from": str(imported_from),
    }
    store.publish(0, 0, reports, meta, lambda: None)


def _group_into_shards(tensors: Sequence[ImportedTensor], shard_bytes: int) -> Iterator[list[ImportedTensor]]:
    """Yield groups of consecutive tensors of at most `shard_bytes`, each with at least one tensor."""
    group: list[ImportedTensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.nbytes > shard_bytes:
            yield group
            group, size = [], 0
        group, size = [*group, tensor], size + tensor.nbytes
    yield group


def copy_tokenizer_files(source: Path, directory: Path) -> Path:
    """Copy the tokenizer files of a model directory to the folder of which `export` reads them, and return that."""
    imported_dir = directory / IMPORTED_DIR
    imported_dir.mkdir()
    for name in PASSTHROUGH_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, imported_dir / name)
    return imported_dir


def write_tokenizer(directory: Path, tokenizer: Tokenizer) -> str:
    """Write tokenizer.json of a run directory, with which `generate` encodes, and return the tokenizer's kind."""
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer.to_json(), indent=2) + "\n")
    return tokenizer.name
