"""The nouns: frozen, self-validating records, the same in a room, on the wire and in the client."""
