"""The program of the training job that makes the student of a model."""
