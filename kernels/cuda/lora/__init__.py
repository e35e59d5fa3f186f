"""LoRA adapters on CUDA: A beside a matmul and B after it, and the backend that launches them."""
