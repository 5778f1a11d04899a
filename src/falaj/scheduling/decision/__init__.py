"""One round of scheduling decisions: a pure function of a snapshot of jobs, nodes, queues and budgets."""
