"""The dialects clients speak. Each is a translation: its request to an Ask or Job, and what is generated to its reply."""
