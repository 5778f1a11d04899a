"""Records of the control plane: workflow runs and pipelines."""
