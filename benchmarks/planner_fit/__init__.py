"""Fits localllm/planner/efficiency.json to published speeds, and reports how well it predicts rows
it has not seen."""
