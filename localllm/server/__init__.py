"""The HTTP server: several APIs translated to one engine request and from its events, behind one
security gate."""
