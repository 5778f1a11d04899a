"""Training: jobs, and the runtime that trains on a worker."""
