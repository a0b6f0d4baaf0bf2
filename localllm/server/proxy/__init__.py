"""Models that run in another server: which there are, and how a request is handed on to one and its answer back."""
