"""Models on other servers: upstreams in the settings, and the front of a pool of localllm
servers."""
