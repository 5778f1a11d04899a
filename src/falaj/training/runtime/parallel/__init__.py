"""Training over several processes: the process group, layouts, sharding and pipelines."""
