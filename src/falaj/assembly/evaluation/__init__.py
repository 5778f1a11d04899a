"""The job that computes the metrics of a model version on a training set."""
