"""Prompts: the rows of the data set (`rows`) and the order in which they are issued (`feed_order`).

Nothing here imports torch or transformers; the tokenizer is the caller's.
"""
