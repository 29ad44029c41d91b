"""The machine and the process: disk, terminal, logs, exit codes, children."""
