"""LoRA adapters: files of low-rank changes of a model's matrices, read, and merged into the model's file."""
