"""Builds of the engine for this machine's accelerator: which one (recipes), made (install), tried
(trial), kept (builds)."""
