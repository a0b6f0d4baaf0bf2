"""The KV cache outside the context: a radix tree over token ids. Its blocks are in memory and on
disk.
"""
