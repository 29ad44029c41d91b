"""The timeline: recorded by the services, read and drawn by the command line."""
