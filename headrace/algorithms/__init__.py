"""The algorithms: pure tensor functions that depend on torch alone."""
