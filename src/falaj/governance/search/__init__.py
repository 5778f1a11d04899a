"""Searches of stored objects: MLflow's filter language, and the queries that it becomes."""
