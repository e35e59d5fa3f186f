"""How an answer looks on a terminal while it comes: markdown rendered, words wrapped whole, reasoning dimmed."""
