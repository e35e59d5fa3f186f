"""Commands that talk to a running server: how they reach it, and its process on this machine."""
