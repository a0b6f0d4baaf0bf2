"""Run the server as a service of this user: write units for the system's manager, and query it."""
