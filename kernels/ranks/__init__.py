"""What processes that share a model exchange: sums and logits."""
