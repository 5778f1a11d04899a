"""A Kubernetes cluster: its nodes, and the objects that the platform keeps there."""
