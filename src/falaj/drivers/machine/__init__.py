"""This machine as a node: its CPUs, memory and GPUs, as far as the platform may use them."""
