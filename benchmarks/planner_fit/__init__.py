"""Fits localllm/planner/efficiency.toml to published speeds, and reports how well it predicts rows
it has not seen."""
