"""The benchmarks behind `raytrain-hpc bench`: ratios against a peer, alternating in one run, medians."""
