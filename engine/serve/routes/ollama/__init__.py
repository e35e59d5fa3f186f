"""Ollama's API (https://github.com/ollama/ollama/blob/main/docs/api.md), translated to what the other routes make."""
