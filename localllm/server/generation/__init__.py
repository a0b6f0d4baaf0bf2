"""From a chat request to a prompt, and from a generation job to text; independent of any
dialect."""
