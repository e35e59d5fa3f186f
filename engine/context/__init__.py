"""Context management: context shift when a context is full, and prefixes saved to files."""
