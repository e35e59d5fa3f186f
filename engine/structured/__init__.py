"""Text that a schema or a grammar constrains, and the forms of answers: reasoning, text, tool calls."""
