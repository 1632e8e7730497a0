"""GGUF files: what their headers say, and the configurations of transformers that they describe."""
