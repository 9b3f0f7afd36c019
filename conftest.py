"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("power", deadline=None)  # on a busy machine a pause is no failure
settings.load_profile("power")
