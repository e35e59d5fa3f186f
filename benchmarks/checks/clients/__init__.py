"""Programs that people point at a server, against `engine serve`: each a script for an environment of its own."""
