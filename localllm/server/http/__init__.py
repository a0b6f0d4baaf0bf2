"""The HTTP border, independent of any dialect: security gate, bodies, sockets, streaming."""
