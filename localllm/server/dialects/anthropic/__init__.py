"""Anthropic's Messages API, as Claude Code and its SDKs use it."""
