"""A build that was damaged is mended by the next one, and an output that cannot be used is named."""

import os
import shutil

import pytest

from patches import build as builder
from patches.errors import QueueError
from patches.queue import load_series
from patches.release import Release, find_wheel, load_lock

SERIES = load_series()


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    wheel = find_wheel(SERIES.upstream, None)
    sources = builder.patched_sources(SERIES, Release(wheel), load_lock(SERIES.upstream))
    with pytest.MonkeyPatch.context() as patch:
        # Applying the queue is most of a build's time and no part of what is tested here.
        patch.setattr(builder, "patched_sources", lambda *_: sources)
        yield builder.build(SERIES, wheel, tmp_path_factory.mktemp("fork"))


def build(output):
    return builder.build(SERIES, find_wheel(SERIES.upstream, None), output)


def files(output):
    """Every file and link of a build, without following our links."""
    result = {}
    for folder, folders, names in os.walk(output):
        for name in (*names, *folders):
            path = os.path.join(folder, name)
            key = os.path.relpath(path, output)
            if os.path.islink(path):
                result[key] = os.readlink(path)
            elif os.path.isfile(path):
                with open(path, "rb") as handle:
                    result[key] = handle.read()
    return result


DAMAGE = {
    "package folder": lambda out: shutil.rmtree(out / "tree" / "openrlhf" / "trainer"),
    "module": lambda out: (out / "tree" / "openrlhf" / "cli" / "train_ppo_ray.py").write_text(""),
    "manifest": lambda out: (out / "tree" / "MANIFEST.json").write_text(""),
    "our link": lambda out: (out / "tree" / "openrlhf" / "device").unlink(),
    "wheel": lambda out: next((out / "dist").glob("*.whl")).write_bytes(b""),
    "editable wheel": lambda out: next((out / "dist" / "editable").glob("*.whl")).unlink(),
    "distributions": lambda out: shutil.rmtree(out / "dist"),
    "upstream's tests": lambda out: shutil.rmtree(out / "upstream"),
    "link beside upstream's tests": lambda out: (out / "upstream" / "openrlhf").unlink(),
    "link to the tree": lambda out: (out / "tree").unlink(),
    "trees": lambda out: shutil.rmtree(out / "trees"),
    "stamp emptied": lambda out: (out / "stamp.json").write_text(""),
    "stamp of another kind": lambda out: (out / "stamp.json").write_text("[]"),
    "stamp gone": lambda out: (out / "stamp.json").unlink(),
    "file for a folder": lambda out: (shutil.rmtree(out / "dist"), (out / "dist").write_text("")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_build_is_built_again(first, name):
    output = first.tree.parent
    assert not build(output).fresh
    whole = files(output)
    DAMAGE[name](output)
    assert files(output) != whole
    assert build(output).fresh
    assert files(output) == whole


def test_files_of_others_are_no_damage(first):
    output = first.tree.parent
    cache = output / "tree" / "openrlhf" / "cli" / "__pycache__"
    cache.mkdir()
    (cache / "x.pyc").write_bytes(b"x")
    assert not build(output).fresh


def test_a_stray_file_among_the_trees_stays(first, tmp_path):
    (tmp_path / "trees").mkdir()
    for name in ("a", "b"):
        (tmp_path / "trees" / name).write_text("mine")
    assert build(tmp_path).fresh
    assert (tmp_path / "trees" / "a").read_text() == (tmp_path / "trees" / "b").read_text() == "mine"


def test_an_output_that_cannot_be_a_folder_is_named(first, tmp_path):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(QueueError, match=r"--output .*file.*: cannot be a folder to write to"):
            build(output)


def test_a_folder_in_place_of_the_link_to_the_tree_is_not_deleted(first, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "mine").write_text("")
    with pytest.raises(QueueError, match="tree: is a folder, not the link that a build makes"):
        build(tmp_path)
    assert (tmp_path / "tree" / "mine").exists()
