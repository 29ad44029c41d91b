"""vLLM, its weights and its door."""
