"""Models of true shapes with random weights."""
