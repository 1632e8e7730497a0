"""GGUF files: what their headers say, the configurations that they describe, and folders made of them."""
