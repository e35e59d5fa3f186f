"""`engine serve`: the OpenAI API and llama-server's native one over HTTP."""
