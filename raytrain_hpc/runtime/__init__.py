"""Interface between a worker and its driver: control channel, heartbeat, worker spec, fault injection."""
