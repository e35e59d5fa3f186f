"""The server's processes. A file's prefix says in which process it runs: `server_` the server's, `engine_` the
engine's, `text_` the one that tokenizes long prompts, `shared_` several."""
