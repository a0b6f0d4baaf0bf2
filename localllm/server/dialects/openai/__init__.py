"""OpenAI's chat completions, completions, embeddings and model list, and Mistral's
fill-in-the-middle."""
