"""raytrain_hpc: train language models on a Ray cluster that changes under you."""
