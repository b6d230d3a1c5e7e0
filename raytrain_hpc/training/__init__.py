"""Training on one rank: the trainer, forward and backward passes, snapshots, checkpoints, and their builder."""
