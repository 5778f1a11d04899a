"""The doors, thin."""
