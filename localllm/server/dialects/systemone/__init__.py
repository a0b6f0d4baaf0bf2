"""POST /v1/systemone: typed questions about a state, answered by probabilities instead of text."""
