"""The Python interface: `open` in this process, `connect` over REST, with the same operations."""
