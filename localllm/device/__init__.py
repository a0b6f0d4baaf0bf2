"""Description of this machine for a language model: usable memory, bandwidth and compute.

Each number carries its basis, for example measured or assumed.
"""
