"""The chat in the terminal's own scrollback: no full screen, the input at the bottom."""
