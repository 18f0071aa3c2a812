"""Demonstrations of the arm as a LeRobot dataset. `demonstrate` is where your teleoperation goes."""

import sys

import numpy as np
from two_joint_arm import make_env

from nexus_bus.data.writer import DatasetWriter

FPS = 10
FEATURES = {  # as the environment shows them: observation.images.<camera>, with the size of its pictures
    "observation.images.render": {"dtype": "image", "shape": [96, 96, 3], "names": ["height", "width", "channels"]},
    "observation.state": {"dtype": "float32", "shape": [2], "names": ["shoulder", "elbow"]},
    "action": {"dtype": "float32", "shape": [2], "names": ["shoulder", "elbow"]},
}


def demonstrate(arm):
    return np.clip((arm.spot - arm.joints) / 0.05, -1, 1).astype(np.float32)


def main(target, episodes):
    arm = make_env()
    with DatasetWriter(target, FPS, FEATURES, "two-joint-arm") as writer:
        for seed in range(episodes):
            seen, rows, done = arm.reset(seed=seed)[0], [], False
            while not done:
                action = demonstrate(arm)
                rows.append((seen["pixels"], seen["agent_pos"], action))  # what was seen, and what was done then
                seen, _, done, _, _ = arm.step(action)
            if len(rows) < 5:
                continue  # the spot lay where the arm stood: nothing to learn, and `nexus data check` would say so
            columns = (np.stack(column) for column in zip(*rows, strict=True))
            writer.add_episode(dict(zip(FEATURES, columns, strict=True)), arm.task_description)
        writer.finalize()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
