"""Records of training: jobs, their state and checkpoints, and the frameworks they use."""
