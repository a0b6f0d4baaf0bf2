"""The KV cache outside the context: a radix tree over token ids, its blocks in memory and on
disk."""
