"""Queues: fair shares against quotas, budgets, history, and what-if questions."""
