"""How the kernels plug into Hugging Face transformers. Knows nothing of the engine."""
