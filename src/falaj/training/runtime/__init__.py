"""What runs on the worker: `fit` and its parts. It needs torch and the standard library, nothing else."""
