"""From messages to a prompt and from text to messages: templates, tool calls, reasoning,
history."""
