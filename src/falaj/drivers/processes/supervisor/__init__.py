"""The process that supervises one attempt. Kept free of imports, so that it starts quickly."""
