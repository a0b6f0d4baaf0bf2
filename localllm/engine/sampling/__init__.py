"""From a row of logits to a token: penalties, filters, draws, rejection sampling of drafts,
grammars."""
