"""Features: views of raw rows, training sets as of a moment, and the newest values online."""
