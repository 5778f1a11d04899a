"""Why a job waits, when it will start, and which change would start it now."""
