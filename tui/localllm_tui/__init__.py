"""The chat in a terminal: a client of the server like any other."""
