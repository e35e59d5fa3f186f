"""Presets: models under names of the user's own, with options; made of TOML files and of Ollama's Modelfiles."""
