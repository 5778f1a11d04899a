"""What Node objects and ResourceSlices say about the nodes of a cluster. Pure."""
