"""OpenAI's Responses API: reads and writes items, and stores responses."""
