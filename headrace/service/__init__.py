"""Code shared by the processes of a run: startup, the stream to the coordinator, and shutdown."""
