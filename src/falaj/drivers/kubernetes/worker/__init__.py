"""The worker, the program of a pod: it fetches an attempt, runs it, and reports. Standard library only."""
