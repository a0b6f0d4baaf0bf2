"""The HTTP border, whatever is said over it: the gate, JSON bodies, headers, sockets, and replies on their way."""
