"""Fit localllm/planner/efficiency.json to published speeds, and report the errors of predictions
for rows that the fit did not use."""
