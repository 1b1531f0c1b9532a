"""Property tests without deadlines: the machine may be busy."""

from hypothesis import settings

settings.register_profile("trainer_core", deadline=None, max_examples=60)
settings.load_profile("trainer_core")
