"""Set up editors and agents to use this server, and check the calls that they make."""
