"""verl's keys and values, and what they mean here."""
