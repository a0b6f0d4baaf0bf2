"""The engine: requests in, steps, events out. Knows the backend contract and no backend; runs in a worker process."""
