"""Records of scheduling: nodes, queues, requests, decisions, usage and simulations."""
