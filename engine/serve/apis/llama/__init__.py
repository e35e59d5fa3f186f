"""llama-server's API, and the server's own."""
