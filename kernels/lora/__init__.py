"""LoRA adapters beside packed weights: changes of low rank, and the backends that add them."""
