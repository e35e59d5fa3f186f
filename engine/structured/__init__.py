"""Text that a schema or a grammar constrains, and tool calls."""
