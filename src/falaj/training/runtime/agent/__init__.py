"""The connection between a run and the platform: the agent, its socket protocol, job context and heartbeat."""
