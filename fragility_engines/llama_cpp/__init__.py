"""Files and plans of GGUF's types, made and measured by llama.cpp."""
