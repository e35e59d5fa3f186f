"""Drafts of several tokens that one step checks: look-up in the text, or a small model."""
