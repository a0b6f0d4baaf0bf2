"""What this machine offers a language model: memory it may use, bandwidth, compute, and how each
number is known."""
