"""Model names, the Hugging Face Hub, and the cache of downloads."""
