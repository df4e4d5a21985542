"""The tests of this folder, and the trainers that they make, see the stand-in device: `make test-device`."""

import pytest
import stand_in

try:
    stand_in.install()
except stand_in.Unavailable as reason:
    raise pytest.UsageError(str(reason)) from None

import trainer_kit

trainer_kit.USE_CPU = False
