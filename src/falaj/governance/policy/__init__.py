"""Who may do what: Cedar policies, a schema made from the operations, decisions that fail closed."""
