"""The gated delta net: its convolution, the recurrence of single tokens, and the chunks of prompts."""
