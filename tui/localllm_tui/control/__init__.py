"""The chat without a screen: what is asked, kept, counted and said, whichever face shows it."""
