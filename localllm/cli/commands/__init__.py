"""One thin file per command: its options, and what it prints."""
