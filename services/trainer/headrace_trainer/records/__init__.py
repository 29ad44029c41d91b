"""What a rank reports: metrics, rows, trackers."""
