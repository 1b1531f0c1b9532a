"""Property tests without deadlines, since the machine may be busy, and rounds in short stretches."""

import pytest
from hypothesis import settings

settings.register_profile("trainer_core", deadline=None, max_examples=60)
settings.load_profile("trainer_core")


@pytest.fixture(scope="module")
def short_stretches():
    """What is worked on together is so little here that every rank has much of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosscloud_trainer.compress.codec.STRETCH_ELEMENTS", 5000)
        patch.setattr("crosscloud_trainer.shard._CHUNK", 3000)
        yield
