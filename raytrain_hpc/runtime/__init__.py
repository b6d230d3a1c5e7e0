"""Between a worker process and its driver: control channel, heartbeat, worker spec, fault injection."""
