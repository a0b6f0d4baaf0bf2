"""Messages to prompt and text to messages: templates, tool calls, reasoning, history."""
