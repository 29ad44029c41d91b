"""The trainer's side of a sync round: its stream and the weights it serves."""
