"""Features: view definitions, point-in-time training sets and online reads."""
