"""The append-only audit log: its tree, its signed heads, and the stand-alone verifier."""
