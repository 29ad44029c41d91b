"""Causal language models, as used by the trainer."""
