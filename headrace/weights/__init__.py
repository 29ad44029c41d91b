"""Weight transfer: layout and snapshot."""
