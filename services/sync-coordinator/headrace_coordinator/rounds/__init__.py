"""A sync round: its states, its driver, its transfers."""
