"""Prompts: the rows of the data set (`rows`) and the order in which they are issued (`feed_order`).

Importing this package imports neither torch nor transformers.
"""
