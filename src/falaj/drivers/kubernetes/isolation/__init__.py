"""What keeps the workspaces of a cluster apart: namespaces, policies, rights, and what the cluster enforces of them."""
