"""The console: web pages that show the platform and act on it, with the rights of the person who signed in."""
