"""Engines that run a Variant, each behind `contract.Backend` and found by the entry-point group
`localllm.backends`."""
