"""Real clients, run against the server."""
