"""Records of training: jobs, their state and checkpoints, the frameworks they use, and the images they run in."""
