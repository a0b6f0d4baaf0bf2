"""Ollama's API: JSON lines instead of events."""
