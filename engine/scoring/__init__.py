"""Log-probabilities of given text: of a prompt's tokens, of choices after it, and perplexity."""
