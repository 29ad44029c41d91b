"""What the processes of a run share, whatever service they are of."""
