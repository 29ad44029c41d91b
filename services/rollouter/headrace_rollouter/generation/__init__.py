"""From a taken prompt to a finished sample."""
