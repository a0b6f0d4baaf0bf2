"""What `localllm bench` measures."""
