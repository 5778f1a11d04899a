"""The resources of nodes and queues: what jobs hold, what is free, and what quotas allow."""
