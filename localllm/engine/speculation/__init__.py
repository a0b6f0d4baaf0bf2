"""Speculative drafting: guess the next tokens cheaply, verify several in one sweep, and only while that pays."""
