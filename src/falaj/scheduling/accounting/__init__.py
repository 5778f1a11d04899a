"""Accounting of jobs: usage, cost, budgets and the usage history of queues."""
