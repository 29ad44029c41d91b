"""Headrace: fully asynchronous RL post-training for language models, as Kubernetes services."""

__version__ = "0.1.0"
