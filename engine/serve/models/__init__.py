"""The models of a server: which there are, loading one that a request names, unloading those that nobody uses."""
