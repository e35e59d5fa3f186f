"""One request: its prompt, its sampling parameters, its sequence of tokens, its text."""
