"""The exchange between processes that share a model: sums and logits."""
