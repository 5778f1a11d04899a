"""Records of the control plane: workflow runs, pipelines and replicas of the model server."""
