"""HTTP/1.1: connections, exchanges and responses."""
