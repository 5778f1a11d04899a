"""Windows of sketches: collected by servers, delivered to the platform, stored as slots."""
