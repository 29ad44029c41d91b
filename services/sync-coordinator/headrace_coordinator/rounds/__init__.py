"""Sync rounds: their states, driver and transfers."""
