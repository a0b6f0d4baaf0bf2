"""The served models: names, loading, admission to memory, unloading."""
