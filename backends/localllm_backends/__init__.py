"""Engines that run a Variant.

Each implements `contract.Backend` and is found by the entry-point group `localllm.backends`.
"""
