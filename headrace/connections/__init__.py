"""How processes reach each other: addresses, secrets, TLS, Redis."""
