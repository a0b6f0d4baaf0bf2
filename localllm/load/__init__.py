"""Decide how a model is loaded: make a LoadPlan from settings, device, model and overrides."""
