"""Ollama's API: JSON lines instead of server-sent events."""
