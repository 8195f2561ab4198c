"""Reading a release's wheel: what it may hold, and what is said of one that is damaged or incomplete."""

import zipfile

import pytest

from patches.errors import QueueError
from patches.release import Release

FILES = {
    "openrlhf/__init__.py": b"",
    "openrlhf/a.py": "x = 'é'\n".encode(),
    "openrlhf-1.dist-info/METADATA": b"Name: openrlhf\nVersion: 1\n",
    "openrlhf-1.dist-info/LICENSE": b"free\n",
}


def wheel(folder, files):
    path = folder / "openrlhf-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_entries_of_folders_are_no_files(tmp_path):
    release = Release(wheel(tmp_path, {"openrlhf/": b"", "tests/": b"", **FILES, "tests/unit/test_x.py": b"pass\n"}))
    assert sorted(release.package) == ["__init__.py", "a.py"]
    assert release.tests == {"unit/test_x.py": b"pass\n"}
    assert release.sources["a.py"] == "x = 'é'\n" and release.version == "1"


@pytest.mark.parametrize(
    ("part", "message"),
    [("openrlhf/", "no package 'openrlhf'"), ("METADATA", "no METADATA"), ("LICENSE", "no LICENSE")],
)
def test_an_incomplete_release_is_refused(tmp_path, part, message):
    path = wheel(tmp_path, {name: data for name, data in FILES.items() if part not in name})
    with pytest.raises(QueueError, match=message) as error:
        Release(path)
    assert str(path) in str(error.value)


def test_a_module_that_is_not_utf8_is_named(tmp_path):
    release = Release(wheel(tmp_path, {**FILES, "openrlhf/b.py": b"# coding: latin-1\nx = '\xe9'\n"}))
    with pytest.raises(QueueError, match=r"b.py: the release's module is not UTF-8 at byte 23"):
        _ = release.sources


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_member_is_no_traceback(tmp_path, compression):
    path = tmp_path / "openrlhf-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in {"openrlhf/long.py": b"abcdefgh" * 1000, **FILES}.items():
            archive.writestr(name, data)
    data = bytearray(path.read_bytes())
    data[50:70] = b"\xff" * 20
    path.write_bytes(data)
    with pytest.raises(QueueError, match="not a wheel, or damaged"):
        Release(path)


def test_a_file_that_is_no_archive_is_named(tmp_path):
    path = tmp_path / "openrlhf-1-py3-none-any.whl"
    path.write_bytes(b"<html>")
    with pytest.raises(QueueError, match="not a wheel, or damaged"):
        Release(path)
