"""The measurements of `localllm bench`."""
