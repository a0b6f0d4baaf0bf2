"""Set up engine builds for this machine's accelerator.

recipes chooses a build, install makes it, trial tests it, and builds keeps it.
"""
