"""The hallway: the order of the rooms. Workflows that survive, and the one controller that runs them."""
