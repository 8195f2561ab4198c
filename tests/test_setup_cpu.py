"""`make setup` says what is missing and what to do, before it installs anything."""

import sys
from pathlib import Path

import pytest

from containers import setup_cpu


def test_another_python_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    with pytest.raises(setup_cpu.SetupError, match=r"Python 3\.11 is needed.*make setup PYTHON="):
        setup_cpu.check_machine()


def test_missing_compiler_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_cpu.shutil, "which", lambda tool: None)
    with pytest.raises(setup_cpu.SetupError, match=r"package g\+\+.*apt-get install"):
        setup_cpu.check_machine()


def test_full_disk_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(setup_cpu, "ROOT", tmp_path)
    monkeypatch.setattr(setup_cpu, "NEEDED_GIB", 10**9)
    with pytest.raises(setup_cpu.SetupError, match="make room"):
        setup_cpu.install_environment("2.13.0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version_file", "fault"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda = hip = xpu = None\n", None),
        ("__version__ = '2.13.0'\ncuda = hip = None\n", None),
        ("__version__ = '2.13.0+cu130'\ncuda = '13.0'\nhip = None\n", "torch 2.13.0+cu130 is built for cuda 13.0"),
        ("__version__ = '2.13.1+cpu'\ncuda = hip = None\n", "what is installed is torch 2.13.1+cpu"),
        (None, "there is none"),
    ],
)
def test_only_a_cpu_build_of_the_pinned_torch_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version_file: str | None, fault: str | None
) -> None:
    if version_file is not None:
        module = tmp_path / "lib/python3.11/site-packages/torch/version.py"
        module.parent.mkdir(parents=True)
        module.write_text(version_file)
    monkeypatch.setattr(setup_cpu, "VENV", tmp_path)
    assert setup_cpu.torch_fault("2.13.0") == fault


@pytest.mark.parametrize(
    ("output", "meaning"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)'", "did not answer"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "not the one that was locked"),
        ("ERROR: No matching distribution found for torch==2.13.0", "TORCH_INDEX"),
        ("something else", "lines above"),
    ],
)
def test_a_failed_install_is_explained(output: str, meaning: str) -> None:
    assert meaning in setup_cpu.meaning(output)


def test_a_failed_command_shows_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_cpu, "LOG", tmp_path / "setup.log")
    with pytest.raises(setup_cpu.SetupError, match=r"did not answer.*setup\.log"):
        setup_cpu.run([sys.executable, "-c", "print('ReadTimeout: é'); raise SystemExit(3)"])
    assert "ReadTimeout: é" in capsys.readouterr().err


def test_the_build_tools_come_from_the_lock_with_their_hashes() -> None:
    entry = setup_cpu.locked("setuptools").splitlines()
    assert entry[0].startswith("setuptools==")
    assert all(line.strip().startswith("--hash=sha256:") for line in entry[1:])
    assert len(entry) > 1
    with pytest.raises(setup_cpu.SetupError, match="make lock"):
        setup_cpu.locked("no-such-package")
