"""Reports of runs: a self-contained HTML page, and a live view in notebooks."""
