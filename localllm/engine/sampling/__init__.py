"""Sampling: from a row of logits to a token. Penalties, filters, draws, rejection sampling of
drafts, grammars.
"""
