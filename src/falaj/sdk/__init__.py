"""The platform from Python: `open` in this process, `connect` over REST, with the same verbs."""
