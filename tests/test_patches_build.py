"""The build of the real fork from the real release: complete or not at all, and never twice."""

import ast
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from patches import build as builder
from patches import fingerprints
from patches.errors import QueueError
from patches.queue import REPO, load_series
from patches.release import Release, find_wheel, load_lock

SERIES = load_series()


@pytest.fixture(scope="module")
def wheel():
    return find_wheel(SERIES.upstream, None)


@pytest.fixture(scope="module")
def built(wheel, tmp_path_factory):
    return builder.build(SERIES, wheel, tmp_path_factory.mktemp("fork"))


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "patches", *arguments], cwd=REPO, capture_output=True, text=True)


def test_a_second_build_changes_nothing(built, wheel):
    output = built.tree.parent
    before = os.readlink(built.tree), built.wheel.stat().st_mtime_ns
    again = builder.build(SERIES, wheel, output)
    assert built.fresh and not again.fresh
    assert (os.readlink(built.tree), built.wheel.stat().st_mtime_ns) == before


def test_the_tree_links_our_modules_and_holds_upstreams(built):
    package = built.tree / "openrlhf"
    for group in SERIES.groups:
        link = built.tree / group.package
        assert link.is_symlink() and link.resolve() == REPO / group.package
    assert (package / "trainer" / "ppo_trainer.py").is_file()


def test_the_wheel_is_the_tree_with_a_local_version_and_without_upstreams_tests(built):
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"openrlhf-{built.version}.dist-info/METADATA").decode()
        assert archive.testzip() is None
        for name in (name for name in names if name.endswith(".py")):
            assert (built.tree / name).read_bytes() == archive.read(name)
    assert not [name for name in names if name.startswith("tests/")]
    assert f"\nVersion: {built.version}\n" in metadata
    assert built.version.startswith(f"{SERIES.upstream}+rlvr.")


def test_equal_content_gives_an_equal_wheel(built, wheel, tmp_path):
    assert builder.build(SERIES, wheel, tmp_path).wheel.read_bytes() == built.wheel.read_bytes()


def test_a_failed_build_leaves_the_last_one_in_place(wheel, tmp_path, monkeypatch):
    first = builder.build(SERIES, wheel, tmp_path)
    target = os.readlink(first.tree)

    def full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(builder, "_write_wheel", full_disk)
    with pytest.raises(OSError, match="no space left"):
        builder.build(SERIES, wheel, tmp_path, label="other")
    assert os.readlink(first.tree) == target
    monkeypatch.undo()
    assert builder.build(SERIES, wheel, tmp_path, label="other").fresh


def test_the_reference_holds_no_module_of_the_features(wheel, tmp_path):
    reference = builder.build(SERIES.without(["features"]), wheel, tmp_path, label="reference")
    assert not (reference.tree / "openrlhf" / "rlvr").exists()
    assert json.loads((reference.tree / "MANIFEST.json").read_text())["groups"] == ["device", "repeat", "fixes"]
    for path in (reference.tree / "openrlhf").rglob("*.py"):
        assert "openrlhf.rlvr" not in path.read_text()


def test_another_file_than_the_locked_wheel_is_refused(wheel, tmp_path):
    other = tmp_path / wheel.name
    other.write_bytes(wheel.read_bytes() + b"\0")
    done = command("build", "--wheel", str(other), "--output", str(tmp_path / "out"))
    assert done.returncode == 1 and "sha256" in done.stderr and str(other) in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out" / "tree").exists()


def test_a_given_wheel_is_enough(wheel, tmp_path):
    """No registry is asked: pip is told that there is no index."""
    environment = {**os.environ, "PIP_NO_INDEX": "1"}
    arguments = [sys.executable, "-m", "patches", "build", "--wheel", str(wheel), "--output", str(tmp_path)]
    subprocess.run(arguments, cwd=REPO, env=environment, check=True, capture_output=True)
    assert (tmp_path / "tree" / "openrlhf" / "__init__.py").is_file()


def test_a_changed_definition_that_we_lean_on_is_named(wheel):
    release, lock = Release(wheel), load_lock(SERIES.upstream)
    path = "trainer/ppo_utils/samples_generator.py"
    text = release.package[path].decode().replace("exhausted", "drained")
    release.package[path] = text.encode()
    with pytest.raises(QueueError, match=r"changed: .*SamplesGenerator._generate_vllm") as error:
        builder.patched_sources(SERIES, release, lock)
    assert "python -m patches lock" in str(error.value)


def test_comments_layout_and_docstrings_are_no_change(wheel):
    release, lock = Release(wheel), load_lock(SERIES.upstream)
    path = "trainer/ppo_utils/samples_generator.py"
    release.package[path] = ast.unparse(ast.parse(release.package[path])).encode()
    found = fingerprints.of_series(SERIES, release.sources, REPO)
    assert fingerprints.compare(lock["fingerprints"], found) == []


def test_every_upstream_class_that_our_modules_extend_is_in_the_lock(wheel):
    locked, sources = load_lock(SERIES.upstream)["fingerprints"], Release(wheel).sources
    extended = {base for group in SERIES.groups for base in upstream_bases(REPO / group.package, sources)}
    assert ("trainer/ppo_utils/samples_generator.py", "SamplesGenerator") in extended
    for module, name in extended:
        assert f"{module}:{name}" in locked
        (defined,) = [n for n in ast.parse(sources[module]).body if isinstance(n, ast.ClassDef) and n.name == name]
        for method in (node for node in defined.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            assert f"{module}:{name}.{method.name}" in locked


def upstream_bases(folder, sources):
    """Module and name of each class of upstream's that a class in ``folder`` extends."""
    for path in folder.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        origin = {
            alias.asname or alias.name: (
                f"{(node.module or '').removeprefix('openrlhf.').replace('.', '/')}.py",
                alias.name,
            )
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in nodes:
            for base in node.bases if isinstance(node, ast.ClassDef) else []:
                if isinstance(base, ast.Name) and origin.get(base.id, ("",))[0] in sources:
                    yield origin[base.id]


def test_status_shows_every_patch_and_succeeds():
    done = command("status")
    assert done.returncode == 0, done.stderr
    for patch in SERIES.patches:
        assert patch.title.split("/")[1] in done.stdout
    assert "agree with the lock" in done.stdout


def test_diff_is_a_patch_of_the_release_that_gives_the_tree(built, wheel, tmp_path):
    release = Release(wheel)
    for path, data in release.package.items():
        target = tmp_path / "openrlhf" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    done = command("diff")
    subprocess.run(["patch", "-p1", "--quiet"], cwd=tmp_path, input=done.stdout, text=True, check=True)
    for path in release.package:
        assert (tmp_path / "openrlhf" / path).read_bytes() == (built.tree / "openrlhf" / path).read_bytes(), path


def test_an_unknown_group_is_named():
    done = command("status", "--without", "feature")
    assert done.returncode == 1 and "no such group" in done.stderr and "features" in done.stderr


def test_the_lock_is_of_the_whole_series():
    done = command("lock", "--without", "features")
    assert done.returncode == 2 and "--without" in done.stderr


def test_an_output_that_is_a_file_is_named_without_a_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    done = command("build", "--output", str(tmp_path / "file"))
    assert done.returncode == 1 and "--output" in done.stderr and "Traceback" not in done.stderr


def test_an_error_of_the_system_is_one_line(tmp_path):
    (tmp_path / ".tree-next").mkdir()
    done = command("build", "--output", str(tmp_path))
    assert done.returncode == 1 and str(tmp_path / ".tree-next") in done.stderr and "Traceback" not in done.stderr


def test_no_file_of_ours_repeats_upstream():
    """Three equal consecutive lines are a copy; the checker of the project stands beside its root."""
    checker = REPO.parent / "shared" / "tools" / "upstream_lines.py"
    if not checker.exists():
        pytest.skip("the checker is not laid beside the project here")
    done = subprocess.run([sys.executable, str(checker), str(REPO)], capture_output=True, text=True)
    assert done.stdout == "" and done.returncode == 0, done.stdout + done.stderr


def test_the_repository_does_not_shadow_the_installed_fork():
    """With an __init__.py the repository's openrlhf folder would win over the fork for all that runs from its root."""
    show = "import openrlhf, openrlhf.cli; print(openrlhf.__file__)"
    done = subprocess.run([sys.executable, "-c", show], cwd=REPO, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).resolve() != (REPO / "openrlhf" / "__init__.py")
