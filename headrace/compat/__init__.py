"""Other systems' configurations."""
