"""What `localllm chat` is made of, beside its screen: who answers, its configuration, its
models."""
