"""Settings of the tests as a whole."""

from hypothesis import settings

# A busy machine is no counterexample; what must end in time has a deadline of its own in its test.
settings.register_profile("headrace", deadline=None, print_blob=True)
settings.load_profile("headrace")
