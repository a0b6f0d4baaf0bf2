"""The HTTP server. It translates several APIs to one engine request and writes its events in each
API's format. One security gate checks all requests."""
