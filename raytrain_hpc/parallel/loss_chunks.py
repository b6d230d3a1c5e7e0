"""Application of the chunked loss to the head of a decoder."""

from __future__ import annotations

from collections.abc import Mapping

from raytrain_hpc.model.cross_entropy import ChunkedLoss
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.parallel.vocab_parallel import make_vocabulary_shard


def apply_loss_chunks(decoder: Decoder, num_chunks: int, axes: Mapping[str, Axis]) -> None:
    """Make the head compute the loss in chunks of positions, in place; 1: it returns logits.

    A tiled head returns logits: each tile of its weight is gathered once, for all positions.
    """
    head = decoder.head
    if head is None or num_chunks == 1 or hasattr(head, "tiles"):
        return
    shard = make_vocabulary_shard(axes["tp"], decoder.spec.vocab_size) if "tp" in axes else None
    head.chunked_loss = ChunkedLoss(num_chunks, shard)
