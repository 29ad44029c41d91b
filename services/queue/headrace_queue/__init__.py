"""The ledger's housekeeper: it feeds prompts, expires dead owners, trims, and reports validation.

It holds no queue and no sample in its own memory. The queues are Redis Streams, and the ledger library moves
samples through them; this service looks after the ledger and shows all of it over HTTP. Killed at any instant
and started again, it goes on from what is in Redis. Its directory, image and chart keep the name `queue`.
"""
