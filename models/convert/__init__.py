"""A Hugging Face folder as a GGUF file: tensors under GGUF's names, metadata, tokenizer, chat template."""
