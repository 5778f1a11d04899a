"""Records: frozen, self-validating models, the same in a service, on the wire and in the client."""
