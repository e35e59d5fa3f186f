"""Latent attention: the rows it caches, single tokens, and the chunks of prompts."""
