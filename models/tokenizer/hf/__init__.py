"""tokenizer.json of Hugging Face folders."""
