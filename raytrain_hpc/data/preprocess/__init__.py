"""From input files to a dataset: partition the input, tokenize it in parallel, assemble shards. Used offline."""
