"""The ledger's housekeeper: it feeds prompts, expires dead owners, trims, and reports validation.

It keeps no queue and no sample in its own memory. The queues are Redis Streams, and the ledger library moves
samples through them. This service maintains the ledger and exposes it over HTTP. It may be killed at any
instant: after a restart it continues from what is in Redis. Its directory, image and chart keep the name
`queue`.
"""
