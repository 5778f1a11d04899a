"""The commands: one module for each group of operations, named as it is typed, and those of the top level."""
