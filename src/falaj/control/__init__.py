"""The hallway: the order of the services. Workflows that survive, and the one controller that runs them."""
