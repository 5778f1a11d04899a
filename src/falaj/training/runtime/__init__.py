"""The training runtime on the worker: `fit` and its parts. It imports torch and the standard library only."""
