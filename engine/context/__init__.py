"""What becomes of a sequence's context outside of its steps: shifted when it is full, kept in a file."""
