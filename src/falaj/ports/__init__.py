"""Ports: one Protocol per backing service. Drivers implement them, and assembly selects the drivers."""
