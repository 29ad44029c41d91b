"""What the processes of a run share: how one starts, keeps its stream to the coordinator, and ends."""
