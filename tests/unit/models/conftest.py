"""The shipped backbone, loaded once, under the numeric settings that the workers use."""

import sys

import pytest

from nexus_bus.models import process

if "torch" not in sys.modules:
    process.settings()

from nexus_bus.models.backbone import Backbone


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return Backbone.load("nexus-nano", device="cpu")
