"""The output of `localllm recommend`."""
