"""Ratios against peers and limits, interleaved A B A B in one run; never part of the tests."""
