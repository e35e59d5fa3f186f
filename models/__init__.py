"""What a model file means: GGUF and Hugging Face checkpoints, configuration, tokenizer, chat template, decoder."""
