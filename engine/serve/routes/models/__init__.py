"""The models of a server over HTTP, as llama-server's router has them: which there are, loading and unloading."""
