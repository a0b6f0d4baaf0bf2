"""Benchmark servers over HTTP, as clients use them. Servers take turns, and results are ratios with
their spread."""
