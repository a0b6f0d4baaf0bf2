"""The chat without a screen: questions, history, token counts and messages, for each face that
shows them."""
