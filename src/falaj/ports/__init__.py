"""The sockets: one Protocol per backing service. Drivers implement them; assembly chooses."""
