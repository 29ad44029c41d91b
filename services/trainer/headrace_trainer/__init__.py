"""The trainer: FSDP2 policy and optimizer under torchrun. It never calls a rollouter."""
