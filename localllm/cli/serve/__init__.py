"""What `localllm serve` is made of, beside the models."""
