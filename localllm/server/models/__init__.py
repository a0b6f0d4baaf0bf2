"""Which models are served: their names, who is loaded at once, and who is unloaded."""
