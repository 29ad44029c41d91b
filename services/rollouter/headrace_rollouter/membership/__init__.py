"""The rollouter as a member: stream, beats, health."""
