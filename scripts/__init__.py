"""Scripts that `make` runs. They are not part of the installed package."""
