"""Makes a command from each operation: its arguments, the parsing of what is typed, and its group."""
