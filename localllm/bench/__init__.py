"""Measures servers from outside, as their users meet them: over HTTP, in turn, as ratios with their
spread."""
