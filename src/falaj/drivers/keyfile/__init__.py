"""Root keys in one file that only its owner can read."""
