"""The house as DESIGN §2 draws it: small files, no forbidden import, nothing unpickled, every worker of one shape."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nexus_bus.config import ROLES, Common

ROOT = Path(__file__).resolve().parents[2]
OURS = ("schemas", "nexus_bus", "workers", "ops", "tests")
FILES = sorted(path for top in OURS for path in (ROOT / top).rglob("*.py"))
LIBRARY = [path for path in FILES if path.relative_to(ROOT).parts[0] != "tests"]
WORKERS = sorted(path for path in (ROOT / "workers").glob("*.py") if path.name != "__init__.py")

LONGEST = 400
VAGUE = re.compile(r"^(utils?|helpers?|manager|misc|common\d*|base_utils)$")
COMPUTE = ("torch", "transformers", "peft", "mujoco")  # no worker's module brings these: settings come first
HEAVY = (*COMPUTE, "gymnasium", "metaworld", "minigrid", "matplotlib", "pyarrow", "av")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def under(modules: set[str], *packages: str) -> set[str]:
    return {module for module in modules if any(module == top or module.startswith(f"{top}.") for top in packages)}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_file_is_long_vaguely_named_or_without_a_docstring(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    assert not VAGUE.match(path.stem)
    if text.strip() and path.name != "conftest.py":
        assert ast.get_docstring(ast.parse(text)), "where in the line does it stand?"


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_only_the_bus_imports_nats(path: Path) -> None:
    if "nexus_bus/bus/" not in path.as_posix():
        assert under(imports(path), "nats") == set()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_is_unpickled(path: Path) -> None:
    assert under(imports(path), "pickle", "cloudpickle", "dill", "joblib", "shelve", "torch.load") == set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name):
            assert node.value.id not in {"torch", "joblib"}, f"line {node.lineno}: use safetensors"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant), f"line {node.value.lineno}"
            assert node.value.value is False, f"line {node.value.lineno}"


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def light() -> dict[str, tuple[str, ...]]:
    """Modules, in the order they are tried, and what importing them must not bring."""
    names = ["nexus_bus.bus", "nexus_bus.client", "nexus_bus.config", "nexus_bus.telemetry", "nexus_bus.worker"]
    names += [
        f"{top.replace('/', '.')}.{path.stem}"
        for top in ("schemas", "nexus_bus/cli")
        for path in sorted((ROOT / top).glob("[a-z]*.py"))
    ]
    return dict.fromkeys(names, HEAVY) | {f"workers.{path.stem}": COMPUTE for path in WORKERS}


def test_light_modules_stay_light() -> None:
    """In one fresh process, so that the test itself is light; the message names who brought what."""
    script = (
        "import importlib, sys\n"
        f"for name, heavy in {light()!r}.items():\n"
        "    importlib.import_module(name)\n"
        "    brought = [h for h in heavy if h in sys.modules]\n"
        "    assert not brought, f'{name} brings {brought}'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.splitlines()[-1:]


@pytest.mark.parametrize("path", WORKERS, ids=name)
def test_every_worker_has_the_shape_of_all(path: Path) -> None:
    """Docstring with what it reads, writes and does when killed; ROLE; an async main and a run."""
    module = tree(path)
    said = ast.get_docstring(module) or ""
    for word in ("Reads ", "Writes ", "Killed "):
        assert re.search(rf"^{word}", said, re.MULTILINE), f"docstring does not say: {word}"
    assigned = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    role = assigned.get("ROLE")
    assert isinstance(role, ast.Constant)
    assert role.value == path.stem
    assert role.value in ROLES
    functions = {node.name for node in module.body if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)}
    assert {"main", "run"} <= functions


def test_there_is_a_worker_for_every_role() -> None:
    assert {path.stem for path in WORKERS} == set(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_every_setting_is_read_by_somebody(role: str) -> None:
    common = {field.name for field in msgspec.structs.fields(Common)}
    own = [field.name for field in msgspec.structs.fields(ROLES[role]) if field.name not in common]
    text = (ROOT / "workers" / f"{role}.py").read_text(encoding="utf-8")
    assert [field for field in own if not re.search(rf"\.{field}\b", text)] == []


def test_settings_of_all_roles_are_read_by_the_frame() -> None:
    text = (ROOT / "nexus_bus" / "worker.py").read_text(encoding="utf-8")
    assert [field.name for field in msgspec.structs.fields(Common) if not re.search(rf"\.{field.name}\b", text)] == []


def test_the_changelog_names_the_version() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f'__version__ = "{version[1]}"' in (ROOT / "nexus_bus" / "__init__.py").read_text(encoding="utf-8")
