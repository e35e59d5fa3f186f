"""The engine behind the server: its queue, its process, and the tokenizing beside it."""
