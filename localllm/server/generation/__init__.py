"""From a conversation to a prompt, from a prompt to text: what every dialect asks for, without any dialect's words."""
