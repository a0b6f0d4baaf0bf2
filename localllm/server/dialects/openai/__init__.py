"""OpenAI's chat, completions, embeddings and model list, and Mistral's fill-in-the-middle."""
