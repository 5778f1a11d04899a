"""Code that an export carries to machines without Falaj: it imports nothing of ours."""
