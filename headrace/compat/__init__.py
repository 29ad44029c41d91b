"""Configurations of other systems: verl's keys and values, and what they mean here."""
