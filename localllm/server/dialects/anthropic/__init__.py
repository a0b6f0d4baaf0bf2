"""Anthropic's Messages, as Claude Code and its SDKs speak them."""
