"""localllm: run large language models on your own machine.

The planner makes a Plan from a Device and a Model, and an Engine runs the Plan. All other parts are
interfaces to these two. Importing this package imports no heavy module: each part is imported by
the code that needs it.
"""

__version__ = "0.2.0"
