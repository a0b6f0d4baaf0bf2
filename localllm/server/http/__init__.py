"""HTTP code that is independent of any dialect: security gate, bodies, sockets, streaming."""
