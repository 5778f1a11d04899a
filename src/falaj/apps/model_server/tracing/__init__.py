"""OpenTelemetry traces of requests, which are sent only where the operator has said so."""
