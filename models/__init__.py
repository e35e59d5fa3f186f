"""What a model file means: GGUF and Hugging Face checkpoints, configuration, tokenizer, chat template, decoder.

Nothing here knows of requests, sampling or devices beyond the backend it is given.
"""
