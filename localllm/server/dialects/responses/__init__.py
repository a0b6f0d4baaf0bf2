"""OpenAI's Responses API: items in, items out, with stored responses."""
