"""Authorization: Cedar policies, a schema generated from the operations, decisions that fail closed."""
