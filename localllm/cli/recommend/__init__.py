"""What `localllm recommend` shows."""
