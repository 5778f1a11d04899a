"""What endpoints take from training sets: request-time features, computed to the same bit, and typical values."""
