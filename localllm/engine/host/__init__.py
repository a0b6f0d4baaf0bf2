"""What the engine knows of the machine it runs on: memory, processors that others use, its own
speed."""
