"""Event files of TensorBoard: of given points, and of a run that learns."""

import math

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def write_events(folder, points, suffix=""):
    """Writes one event file with `(tag, step, value, wall_time)` points."""
    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for tag, step, value, wall_time in points:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        writer.add_event(Event(wall_time=wall_time, step=step, summary=summary))
    writer.close()


def write_run(folder, seed, shift=0.0, steps=60):
    """A run that learns: all curves that the trainer logs."""
    rng = np.random.default_rng(seed)
    points = []
    for step in range(1, steps + 1):
        success = 1 / (1 + math.exp(-(step - 30 + 10 * shift) / 8))
        values = {
            "train/reward": 10 * success + rng.normal(0, 0.8),
            "train/env/success_rate": min(max(success + rng.normal(0, 0.08), 0), 1),
            "train/env/invalid_actions": 0.1 * (1 - success),
            "train/entropy/early_turns": 0.3 - 0.1 * success + rng.normal(0, 0.01),
            "train/entropy/late_turns": 0.25 - 0.15 * success + rng.normal(0, 0.01),
        }
        if step % 5 == 0:
            values["eval/iid/success_rate"] = min(max(success + rng.normal(0, 0.04), 0), 1)
            values["eval/ood/success_rate"] = min(max(0.8 * success + rng.normal(0, 0.04), 0), 1)
        points += [(tag, step, value, 1000.0 + step) for tag, value in values.items()]
    write_events(folder, points)
