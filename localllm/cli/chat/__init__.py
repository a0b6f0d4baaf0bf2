"""Parts of `localllm chat` apart from its screen: engines, configuration, models."""
