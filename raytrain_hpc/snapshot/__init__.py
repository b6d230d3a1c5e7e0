"""In-memory snapshots of training state: stores of the last steps, shared memory, and replication to peers."""
