"""Reading the queue: every mistake in a file is named with file, key and what was expected."""

import json

import pytest

from patches.errors import QueueError
from patches.queue import Group, Series, load_series
from patches.release import load_lock

SERIES = 'upstream = "1"\n[[group]]\nname = "device"\npackage = "p"\npurpose = "x"\npatches = ["one"]\n'
PATCH = 'purpose = "x"\ndrop_when = "y"\n[[edit]]\nmodule = "a.py"\nfind = "f($X)"\nreplace = "g($X)"\n'


def load(root, patch=PATCH, series=SERIES):
    (root / "device").mkdir(exist_ok=True)
    (root / "series.toml").write_text(series)
    (root / "device" / "one.toml").write_text(patch)
    return load_series(root)


def test_a_queue_is_read_as_it_is_written(tmp_path):
    series = load(tmp_path, PATCH + "count = 3\n", SERIES + 'leans_on = ["a.py:f"]\n')
    (edit,) = series.patches[0].edits
    assert (edit.find, edit.replace, edit.counts) == ("f($X)", "g($X)", {"a.py": 3})
    assert series.groups[0].leans_on == ("a.py:f",) and series.upstream == "1"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[[edit]]", "[edit]", r"\[edit\] is a single table; write \[\[edit\]\]"),
        ('"f($X)"', '""', "edit 1: find = '': must be a string that is not empty"),
        ('"f($X)"', '"f($X); x = 1"', "find = .*: must be one expression or one statement"),
        ('"f($X)"', '"f(("', "find = .*: must be one expression or one statement"),
        ('"g($X)"', "3", "edit 1: replace = 3: must be a string"),
        ('purpose = "x"', "purpose = 3", "one.toml: purpose = 3: must be a string"),
        ('drop_when = "y"', 'drop_when = " "', "drop_when = ' ': must be a string that is not empty"),
        ('drop_when = "y"\n', "", "missing key 'drop_when'"),
        ('module = "a.py"', 'module = "a.py"\ncount = "4"', "a.py: count = '4': must be a whole number of at least 1"),
        ('module = "a.py"', 'module = "a.py"\ncount = 0', "a.py: count = 0: must be a whole number of at least 1"),
        ('module = "a.py"', 'module = "a.py"\ncount = true', "a.py: count = True: must be a whole number"),
        ('module = "a.py"', "counts = {}", "counts = {}: must be a table of module paths with a number each"),
        ('module = "a.py"', 'counts = {"a.py" = 1.5}', "a.py: count = 1.5: must be a whole number"),
        ('module = "a.py"', 'counts = {"a.py" = 1}\ncount = 1', "'count' goes with 'module'"),
        ('module = "a.py"', 'module = "a.py"\nleave = "b.py"', "leave = 'b.py': must be a table of module paths"),
        ('module = "a.py"', 'module = "a.py"\nwithin = 1', "within = 1: must be a string"),
        ('module = "a.py"', 'module = "a.py"\nimport = "from a"', "import = 'from a': must be one import statement"),
        ('module = "a.py"', 'module = "a.py"\nimport = [1]', r"import = \[1\]: must be a list of strings"),
        ('module = "a.py"', 'modul = "a.py"', "one.toml: edit 1: unknown key 'modul'"),
    ],
)
def test_a_mistake_in_a_patch_is_named(tmp_path, old, new, message):
    assert old in PATCH
    with pytest.raises(QueueError, match=message) as error:
        load(tmp_path, PATCH.replace(old, new))
    assert str(tmp_path / "device" / "one.toml") in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('package = "p"\n', "", "group 'device': missing key 'package'"),
        ('name = "device"\n', "", "missing key 'name'"),
        ('purpose = "x"', "purpose = []", r"purpose = \[\]: must be a string"),
        ('["one"]', '"one"', "patches = 'one': must be a list of strings"),
        ('["one"]', '["one", "one"]', "patch 'one' is named twice"),
        ('["one"]', '["one", "two"]', "two.toml: no such file"),
        ('["one"]', "[]", "one: not named in series.toml"),
        ('["one"]', '["one"]\nleans = []', "unknown key 'leans'; a group has .*leans_on"),
        ('["one"]', '["one"]\nleans_on = "a"', "leans_on = 'a': must be a list of strings"),
        ("[[group]]", "[group]", r"\[group\] is a single table"),
        ('upstream = "1"', "upstream = 1", "upstream = 1: must be a string"),
        ('upstream = "1"', 'upstream = "1', "not TOML"),
    ],
)
def test_a_mistake_in_the_series_is_named(tmp_path, old, new, message):
    assert old in SERIES
    with pytest.raises(QueueError, match=message):
        load(tmp_path, series=SERIES.replace(old, new))


def test_a_patch_that_is_not_utf8_is_named(tmp_path):
    load(tmp_path)
    (tmp_path / "device" / "one.toml").write_bytes(b'purpose = "\xff"\n')
    with pytest.raises(QueueError, match=r"one.toml: not UTF-8 at byte 11"):
        load_series(tmp_path)


def test_only_the_last_groups_can_be_left_out():
    series = Series("1", tuple(Group(name, "p", "x", ()) for name in ("device", "repeat", "features")))
    assert [group.name for group in series.without(["features", "repeat"]).groups] == ["device"]
    assert series.without([]) == series
    with pytest.raises(QueueError, match=r"--without repeat: the later groups need it \(features\)"):
        series.without(["repeat"])
    with pytest.raises(QueueError, match=r"--without device: .*\(repeat\)"):
        series.without(["device", "features"])
    with pytest.raises(QueueError, match="leaves no group; 'device' is needed by all"):
        series.without(["device", "repeat", "features"])
    with pytest.raises(QueueError, match=r"feature: no such group; the series has device, repeat, features"):
        series.without(["feature"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{}", "'version' is missing or no str"),
        (b"[]", "'version' is missing"),
        (b"{", "openrlhf-1.json:1: not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (json.dumps({"version": "1", "wheel": "w", "sha256": "0", "requires_dist": []}).encode(), "'fingerprints'"),
    ],
)
def test_a_damaged_lock_is_named(tmp_path, data, message):
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "openrlhf-1.json").write_bytes(data)
    with pytest.raises(QueueError, match=message):
        load_lock("1", tmp_path)


def test_a_missing_lock_says_what_writes_it(tmp_path):
    with pytest.raises(QueueError, match="python -m patches lock"):
        load_lock("1", tmp_path)
