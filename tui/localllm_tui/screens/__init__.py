"""What fills the terminal: the chat, and what comes on top of it."""
