"""Models as plain math: they know nothing of ranks, groups or layouts."""
