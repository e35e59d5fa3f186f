"""Routes whose answers are vectors of texts, or are made of such."""
