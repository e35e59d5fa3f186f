"""Answers with a section of reasoning between two tags: how a template writes it, how it is read, what bounds it."""
