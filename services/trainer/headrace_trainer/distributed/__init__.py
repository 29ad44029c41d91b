"""The ranks of one trainer: groups, signed messages, heartbeat."""
