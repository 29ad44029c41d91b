"""One plugin of every kind; docs/extending.md shows these files."""
