"""What travels when weights travel: layout, checkpoint format, snapshot."""
