"""The workflow of a study: trials are submitted as jobs, judged while they run, and reported to tracking."""
