"""A run's configuration: its fields, the rules over them, how it is read."""
