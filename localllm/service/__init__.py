"""The server as a service of this user: units for each system's manager, and asking that manager
about it."""
