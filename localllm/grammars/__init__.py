"""What clients constrain answers with, in the words that the engine's grammars are written in. Text
to text."""
