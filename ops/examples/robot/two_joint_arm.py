"""A robot of your own: a Gymnasium environment with LeRobot's names. `drive` and `camera` are where your driver goes."""

import gymnasium
import numpy as np


class Arm(gymnasium.Env):
    """Two joints; reach the spot of light."""

    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)  # joint velocities
    observation_space = gymnasium.spaces.Dict(
        pixels=gymnasium.spaces.Box(0, 255, (96, 96, 3), np.uint8), agent_pos=gymnasium.spaces.Box(-4, 4, (2,), np.float32)
    )
    task_description = "reach the spot of light"
    _max_episode_steps = 100

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.joints, self.spot = np.zeros(2), self.np_random.uniform(-1, 1, 2)
        return self.seen(), {"is_success": False}

    def step(self, action):
        self.drive(action)
        near = float(np.abs(self.joints - self.spot).max()) < 0.1
        return self.seen(), float(near), near, False, {"is_success": near}

    def drive(self, action):
        self.joints = np.clip(self.joints + 0.05 * action, -2, 2)  # here: talk to the motors

    def camera(self):  # here: take a picture
        picture = np.full((96, 96, 3), 40, np.uint8)
        for place, colour in ((self.spot, (255, 230, 120)), (self.joints, (90, 160, 255))):
            row, column = (48 + 20 * place).astype(int)
            picture[row - 3 : row + 4, column - 3 : column + 4] = colour
        return picture

    def seen(self):
        return {"pixels": self.camera(), "agent_pos": self.joints.astype(np.float32)}


def make_env():
    return Arm()
