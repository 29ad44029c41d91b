"""The queue service: housekeeping around the ledger's streams.

It feeds prompts, takes work back from owners that expired, reports validation, trims what no checkpoint
needs any more, and shows all of it over HTTP. It holds no sample in its own memory: killed at any instant
and started again, it goes on from what is in Redis.
"""
