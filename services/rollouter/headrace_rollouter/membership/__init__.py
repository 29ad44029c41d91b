"""The rollouter as a member of the run: stream, heartbeats, health."""
