"""LM Studio's own API: its lists of models, loading and unloading."""
