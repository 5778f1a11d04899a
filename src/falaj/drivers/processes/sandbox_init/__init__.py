"""Programs that run inside the sandbox, from their source text: standard library only."""
