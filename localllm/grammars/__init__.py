"""Converts clients' constraints on answers into the engine's grammar syntax, from text to text."""
