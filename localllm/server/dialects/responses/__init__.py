"""OpenAI's Responses: items in, items out, and a store of past ones."""
