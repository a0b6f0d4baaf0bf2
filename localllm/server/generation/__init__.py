"""Builds prompts from chat requests and text from generation jobs, for every API dialect."""
