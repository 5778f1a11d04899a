"""Where the time of a step goes: ranges around its parts, a trace of some steps, and the verdict in words."""
