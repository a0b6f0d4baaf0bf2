"""Parts of `localllm serve` apart from the models."""
