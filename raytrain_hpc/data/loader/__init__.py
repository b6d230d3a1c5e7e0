"""From sample numbers to batches: sampler, streams, packing, prefetching, evaluation; local or by Ray Data."""
