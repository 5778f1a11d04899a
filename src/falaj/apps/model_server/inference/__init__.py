"""Inference requests: paths, the Open Inference Protocol, feature lookup and predictions."""
