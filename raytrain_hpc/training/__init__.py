"""One rank at training time: the trainer, its passes, snapshots and checkpoints, and how they are built."""
