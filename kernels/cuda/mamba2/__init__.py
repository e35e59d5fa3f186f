"""Mamba2's state space layer: the scan of single tokens, the chunks of prompts, and the gated norm of both."""
