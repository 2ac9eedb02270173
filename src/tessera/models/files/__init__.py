"""Read a model's files, a Hugging Face folder or a GGUF file, and write folders."""
