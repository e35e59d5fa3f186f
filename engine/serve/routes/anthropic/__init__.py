"""Anthropic's routes: their requests as chat completions have them, and answers as blocks of content."""
