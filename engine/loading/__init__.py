"""Loading a model: which rank holds what, the cache that fits beside it, and the runner of a part."""
