"""What is loaded, and how: one LoadPlan from settings, device, model and overrides, passed on
whole."""
