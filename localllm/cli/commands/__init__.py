"""One short file per command: its options and its output."""
