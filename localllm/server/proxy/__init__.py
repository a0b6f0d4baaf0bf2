"""Models that run on other servers: upstreams of the settings, and the front of a pool of our own
servers."""
