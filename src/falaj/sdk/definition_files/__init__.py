"""Definition files: features and jobs in TOML, YAML and Python, every fault with its line."""
