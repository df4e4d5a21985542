"""What holds for the whole suite."""

import gc


def pytest_collection_finish(session):
    """Takes all that the imports made out of sight of the garbage collector.

    accelerate has it go through everything at the beginning of each training: a million objects of torch and TRL, four
    fifths of the time of a test that trains a tiny model for one step.
    """
    gc.collect()
    gc.freeze()
