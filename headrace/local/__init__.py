"""The local runner: the services of a run as supervised processes on this machine."""
