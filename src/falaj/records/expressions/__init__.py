"""The expressions of request-time features: their grammar and types. Nothing of them is run as Python."""
