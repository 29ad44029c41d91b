"""Samples as they go between processes: encoding and checks."""
