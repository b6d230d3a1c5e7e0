"""Import of a torch.distributed.checkpoint directory of torchtitan as a run directory with a checkpoint at step 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.data.tokenizer.base import ByteTokenizer, Tokenizer, parse_tokenizer_spec
from raytrain_hpc.data.tokenizer.registry import load_tokenizer
from raytrain_hpc.dcp.chunk_reader import ChunkReader, plan_box_copies, split_into_boxes
from raytrain_hpc.dcp.metadata_reader import DcpTensor, read_metadata
from raytrain_hpc.dcp.torchtitan_names import (
    EMBEDDING,
    HEAD,
    DcpWeight,
    find_weights,
    list_other_state,
    match_weights,
)
from raytrain_hpc.dcp.torchtitan_spec import read_settings, resolve_model
from raytrain_hpc.errors import DataError, ModelError
from raytrain_hpc.huggingface.atomic_dir import atomic_directory
from raytrain_hpc.huggingface.imported_run import (
    SHARD_BYTES,
    ImportedModel,
    ImportedTensor,
    copy_tokenizer_files,
    write_imported_run,
    write_tokenizer,
)
from raytrain_hpc.state.shard_index import Box, RegionCopy, TensorSlices

BOX_BYTES = 32 << 20
RotaryLayout = Literal["auto", "interleaved", "half"]


@dataclass(frozen=True)
class DcpImport:
    """Summary of an imported directory."""

    model_spec: ModelSpec
    tokenizer_kind: str | None  # None if no tokenizer was given
    rotary_layout: RotaryLayout  # of the source
    ignored: tuple[str, ...]  # state that was not imported: optimizer, lr_scheduler, ...


def import_dcp(
    source: str | Path,
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    recipe: str | None = None,
    params: str | Path | None = None,
    tokenizer: str | None = None,
    rotary_layout: RotaryLayout = "auto",
    box_bytes: int = BOX_BYTES,
    shard_bytes: int = SHARD_BYTES,
) -> DcpImport:
    """Write the model in DCP directory `source` as run directory `out`, with fp32 weights. No pickled code is executed.

    The directory must have the names of torchtitan's Llama 3 or Qwen3. Any layout can be imported. One chunk, and one
    box of at most `box_bytes`, are held in memory at a time.

    Args:
        overrides: `key=value` words with what the weights do not show: model.num_heads, model.rope_theta,
            model.norm_eps, train.seq_len, and model.rope_factor if it is not 1.
        recipe: Name or file of a recipe to take these from.
        params: File params.json of Meta, or of torchtitan's model arguments, to take these from.
        tokenizer: byte, hf:PATH or tiktoken:FILE; None: no tokenizer.
        rotary_layout: Order of the channels of a head. interleaved: pairs are neighbors (torchtitan's Llama); half: a
            pair is half a head apart (its Qwen3); auto: half if queries are normalized, else interleaved.

    Raises CheckpointError if the directory is damaged, incomplete or unsafe, or if `out` exists; ModelError if it holds
    another kind of model; ConfigError if a setting is missing or wrong; DataError for an unusable tokenizer.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    metadata = read_metadata(source)
    weights, other_state = find_weights(source, metadata.tensors)
    settings = read_settings(recipe, overrides, None if params is None else Path(params).expanduser())
    spec, seq_len = resolve_model(source, weights, settings)
    matched, reader = match_weights(source, weights, spec), ChunkReader(source)
    for weight in matched:
        reader.check(weight.tensor)
    if rotary_layout == "auto":
        rotary_layout = "half" if spec.qk_norm else "interleaved"
    if spec.tie_embeddings and HEAD in weights:
        _check_tied(source, reader, weights[EMBEDDING], weights[HEAD], box_bytes)
    interleaved_dim = spec.head_dim if rotary_layout == "interleaved" else 0
    tensors = [tensor for weight in matched for tensor in _plan_tensors(reader, weight, interleaved_dim, box_bytes)]
    with atomic_directory(out) as directory:
        kind = None if tokenizer is None else _import_tokenizer(tokenizer, directory, spec)
        model = ImportedModel(spec, seq_len, str(source))
        write_imported_run(directory, out, model, tensors, imported_from=source, shard_bytes=shard_bytes)
    ignored = sorted({*other_state, *list_other_state(metadata.objects)})
    return DcpImport(spec, kind, rotary_layout, tuple(ignored))


def _plan_tensors(
    reader: ChunkReader, weight: DcpWeight, interleaved_dim: int, box_bytes: int
) -> Iterator[ImportedTensor]:
    """Yield the boxes of a parameter that one weight fills.

    interleaved_dim: channels per head if those of rotary weights are interleaved, else 0. Such heads are not divided.
    """
    head_dim = interleaved_dim if weight.is_rotary else 0
    boxes = split_into_boxes(weight.tensor, head_dim or 1, box_bytes)
    target = weight.mapping.box
    for box, copies in zip(boxes, plan_box_copies(weight.tensor, boxes), strict=True):
        offsets = tuple(start + base for start, base in zip(box.offsets, target.offsets, strict=True))
        slices = TensorSlices(
            f"model.{weight.mapping.name}", weight.mapping.shape, "float32", (Box(offsets, box.sizes),)
        )
        yield ImportedTensor(slices, partial(_read_box, reader, weight.tensor, copies, box.sizes, head_dim))


def _read_box(
    reader: ChunkReader, tensor: DcpTensor, copies: Sequence[RegionCopy], sizes: tuple[int, ...], head_dim: int
) -> Tensor:
    """Read one box, fp32 [*sizes]. head_dim: channels per head if they are interleaved, else 0."""
    box = reader.read(tensor, copies, sizes)
    return split_interleaved_heads(box, head_dim) if head_dim else box


def split_interleaved_heads(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows [heads * head_dim, ...] of each head: first those with even numbers, then those with odd ones.

    Rotary positions rotate pairs of channels. In torchtitan's Llama, as in Meta's, these are neighbors; in the
    built-in decoder, as in Hugging Face's, half a head apart. Queries and keys are reordered alike, so scores stay.
    """
    return rows.view(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _check_tied(source: Path, reader: ChunkReader, embedding: DcpTensor, head: DcpTensor, box_bytes: int) -> None:
    """Raise ModelError unless the head has the same weights as the embedding."""
    reader.check(head)
    boxes = split_into_boxes(embedding, 1, box_bytes)
    planned = zip(boxes, plan_box_copies(embedding, boxes), plan_box_copies(head, boxes), strict=True)
    if head.shape != embedding.shape or not all(
        torch.equal(reader.read(embedding, first, box.sizes), reader.read(head, second, box.sizes))
        for box, first, second in planned
    ):
        raise ModelError(f"{source}: {HEAD} differs from {EMBEDDING}; remove model.tie_embeddings, which ties them")


def _import_tokenizer(text: str, directory: Path, spec: ModelSpec) -> str:
    """Write the tokenizer of `--tokenizer` into a run directory, and return its kind."""
    parsed = parse_tokenizer_spec(text)
    if parsed.kind != "byte" and not parsed.is_from_file:
        raise DataError(f"tokenizer={text!r}: only byte, hf:PATH and tiktoken:FILE exist before there is data")
    tokenizer: Tokenizer = load_tokenizer(parsed) if parsed.is_from_file else ByteTokenizer()
    if tokenizer.vocab_size > spec.vocab_size:
        raise DataError(f"tokenizer={text!r}: has {tokenizer.vocab_size} tokens, the model {spec.vocab_size}")
    if parsed.kind == "hf":
        path = Path(parsed.argument).expanduser()
        copy_tokenizer_files(path if path.is_dir() else path.parent, directory)
    return write_tokenizer(directory, tokenizer)
