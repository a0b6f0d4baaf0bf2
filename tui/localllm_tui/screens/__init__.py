"""The screens of the terminal: the chat, and the dialogs on top of it."""
