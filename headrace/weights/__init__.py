"""Weight transfer: layout, snapshot and transports."""
