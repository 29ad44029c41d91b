"""Checkpoints: written, verified, resumed from, exported."""
