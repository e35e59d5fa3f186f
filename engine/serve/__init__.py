"""`engine serve`: the OpenAI API and llama-server's native one over HTTP.

`engine_port` is the boundary to what computes; everything on this side of it is text, JSON and connections.
"""
