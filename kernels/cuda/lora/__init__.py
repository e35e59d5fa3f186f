"""LoRA adapters on CUDA: two kernels beside a matmul, and the backend that launches them."""
