"""One process a run: finds the cluster, starts the workers, records what they report, publishes checkpoints."""
