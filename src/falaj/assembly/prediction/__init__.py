"""Batch prediction: the program that runs without keys, and how a run over files of this machine is started."""
