"""The Open Inference Protocol over gRPC: HTTP/2 framing, messages, and the methods of the services."""
