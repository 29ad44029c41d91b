"""Code from outside the project: files and modules of the user, and plugins of installed packages."""
