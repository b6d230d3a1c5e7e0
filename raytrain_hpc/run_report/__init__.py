"""What became of a run, or of several, as one page that needs nothing else."""
