"""localllm: large language models on the machine in front of you.

A Device and a Model make a Plan; an Engine runs the Plan; everything else is a face of those two.
Importing this package imports nothing heavy: every room is imported by whoever needs it.
"""

__version__ = "0.2.0"
