"""Starts the ranks of a node and learns how they ended."""
