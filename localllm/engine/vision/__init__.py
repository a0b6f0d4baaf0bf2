"""Images in prompts: files decoded, laid out as tokens, encoded into embeddings."""
