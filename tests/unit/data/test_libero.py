"""LIBERO's HDF5 demonstrations become LeRobot: pictures upright, actions as they were, nothing read from other files."""

import json
from pathlib import Path

import numpy as np
import pytest

from nexus_bus.data.convert import convert
from nexus_bus.data.reader import Dataset
from nexus_bus.errors import BadMessage

h5py = pytest.importorskip("h5py")

LENGTHS = {"demo_0": 4, "demo_1": 3, "demo_10": 2, "demo_2": 5}  # demo_10 comes last


def picture(number: int, frame: int, camera: int) -> np.ndarray:
    """Bright at the top left, as the simulator gives it."""
    found = np.full((16, 16, 3), 10 * frame + 30 * camera, np.uint8)
    found[:4, :4] = 200 + number
    return found


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["problem_info"] = json.dumps({"language_instruction": '"put the bowl on the plate"'})
        for number, (name, length) in enumerate(LENGTHS.items()):
            demo = data.create_group(name)
            demo["actions"] = np.full((length, 7), number / 10)
            demo["rewards"] = (np.arange(length) == length - 1).astype(np.uint8)
            demo["dones"] = (np.arange(length) == length - 1).astype(np.uint8)
            obs = demo.create_group("obs")
            obs["ee_states"] = np.full((length, 6), number)
            obs["gripper_states"] = np.full((length, 2), -number)
            for camera, key in enumerate(("agentview_rgb", "eye_in_hand_rgb")):
                obs[key] = np.stack([picture(number, frame, camera) for frame in range(length)])
    return path


def test_demonstrations_are_imported(tmp_path: Path) -> None:
    info = convert(write(tmp_path / "KITCHEN_put_the_bowl_demo.hdf5"), tmp_path / "set")
    assert (info.episodes, info.frames) == (4, 14)
    dataset = Dataset(tmp_path / "set")
    assert [episode.end - episode.begin for episode in dataset.episodes] == [4, 3, 5, 2], "by number, not by name"
    assert (dataset.fps, dataset.tasks) == (20.0, {"put the bowl on the plate": 0})
    frame = dataset.frame(5)  # demo_1, frame 1
    np.testing.assert_array_equal(frame.action, np.full(7, 0.1, np.float32))
    np.testing.assert_array_equal(frame.state, np.array([1] * 6 + [-1] * 2, np.float32))
    for camera, name in enumerate(("agentview", "eye_in_hand")):
        np.testing.assert_array_equal(frame.images[name], picture(1, 1, camera)[::-1, ::-1])
    done = np.concatenate([columns["next.done"] for _, columns in dataset.numbers(["next.done"])]).ravel()
    assert np.flatnonzero(done).tolist() == [3, 6, 11, 13]


def test_pictures_may_stay_as_they_are(tmp_path: Path) -> None:
    convert(write(tmp_path / "one.hdf5"), tmp_path / "set", turn=False, drop=["observation.images.eye_in_hand", "next.reward"])
    images = Dataset(tmp_path / "set").images(5)
    assert set(images) == {"agentview"}
    np.testing.assert_array_equal(images["agentview"], picture(1, 1, 0))


def test_a_directory_of_files_is_one_dataset_and_names_stand_in_for_sentences(tmp_path: Path) -> None:
    write(tmp_path / "raw/open_the_drawer_demo.hdf5")
    with h5py.File(tmp_path / "raw/open_the_drawer_demo.hdf5", "a") as file:
        del file["data"].attrs["problem_info"]
    write(tmp_path / "raw/put_the_bowl_demo.hdf5")
    assert convert(tmp_path / "raw", tmp_path / "set").episodes == 8
    assert set(Dataset(tmp_path / "set").tasks) == {"open the drawer", "put the bowl on the plate"}


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "one.hdf5")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadMessage, match=r"one\.hdf5: no whole HDF5 file"):
        convert(path, tmp_path / "set")
    path.write_bytes(whole)
    with h5py.File(path, "a") as file:
        del file["data/demo_1/obs/ee_states"]
        file["data/demo_1/obs/ee_states"] = np.zeros((2, 6))
    with pytest.raises(BadMessage, match=r"one\.hdf5: data/demo_1 has rows 2 of obs/ee_states and 3 of obs/gripper_states"):
        convert(path, tmp_path / "set")
    with h5py.File(path, "a") as file:
        del file["data/demo_1/obs"]
    with pytest.raises(BadMessage, match="there is no data/demo_1/obs"):
        convert(path, tmp_path / "set")
    with h5py.File(path, "a") as file:
        del file["data"]
        file.create_group("data")
    with pytest.raises(BadMessage, match="data holds no demo_0"):
        convert(path, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_actions_that_are_not_finite_name_their_demonstration(tmp_path: Path) -> None:
    path = write(tmp_path / "one.hdf5")
    with h5py.File(path, "a") as file:
        file["data/demo_2/actions"][3, 1] = np.nan
    with pytest.raises(BadMessage, match=r"one\.hdf5: data/demo_2: episode\.action: .* not finite, in frame 3"):
        convert(path, tmp_path / "set")


@pytest.mark.parametrize("how", ["link", "external", "virtual"])
def test_what_lies_in_another_file_is_not_read(tmp_path: Path, how: str) -> None:
    """A file of one tenant that shows another's numbers."""
    path, secret = write(tmp_path / "one.hdf5"), write(tmp_path / "secret.h5")
    with h5py.File(path, "a") as file:
        del file["data/demo_0/actions"]
        if how == "link":
            file["data/demo_0/actions"] = h5py.ExternalLink(str(secret), "data/demo_0/actions")
        elif how == "external":
            file["data/demo_0"].create_dataset("actions", (4, 7), np.float32, external=[(str(secret), 0, 4 * 7 * 4)])
        else:
            layout = h5py.VirtualLayout((4, 7), np.float64)
            layout[:] = h5py.VirtualSource(str(secret), "data/demo_0/actions", (4, 7))
            file["data/demo_0"].create_virtual_dataset("actions", layout)
    with pytest.raises(BadMessage, match=r"is a link; copy|lies in another file"):
        convert(path, tmp_path / "set")


def test_a_column_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "one.hdf5")
    with h5py.File(path, "a") as file:
        del file["data/demo_0/actions"]
        file["data/demo_0"].create_dataset("actions", (1 << 28, 7), np.float32, chunks=(1 << 16, 7), compression="gzip")
    with pytest.raises(BadMessage, match=r"unpacks to .* bytes at once"):
        convert(path, tmp_path / "set")
