"""The server's processes. A file's prefix says in which it runs: `server_` in the server's own, `engine_` in the
engine's, `text_` in one that tokenizes long prompts, `shared_` in several."""
