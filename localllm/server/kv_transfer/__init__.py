"""POST /v1/kv: other servers get the KV of a prompt."""
