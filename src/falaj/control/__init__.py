"""The control plane: the controller, its lease, jobs, durable workflows and pipelines."""
