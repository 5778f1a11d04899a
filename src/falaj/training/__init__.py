"""Training: the job service, and the runtime library that trains on a worker."""
