"""Causal language models as the trainer uses them."""
