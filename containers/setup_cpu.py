"""Make the CPU environment in .venv and install the fork into it: `make setup`.

Needs only the standard library, and runs under any Python 3.8 or newer as far as the message that says which one is
wanted. What is already there is left alone: the environment is installed again when its lock changes, the fork when
`python -m patches build` gives another wheel. torch comes first and by itself, because its CPU build is found in
different places on different machines: TORCH_INDEX=URL names the index, by default pip looks where it is configured to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from glob import glob
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "containers" / "locks" / "cpu.txt"
STAMP = VENV / "setup.json"
LOG = ROOT / "build" / "setup.log"
NEEDED_GIB = 7  # the environment takes four, and pip unpacks beside it


class SetupError(Exception):
    """Something that the user has to see to; the message says what to do."""


def main() -> int:
    try:
        check_machine()
        pin = torch_pin()
        stamp = read_stamp()
        wanted = environment_digest(pin)
        if stamp.get("environment") != wanted:
            install_environment(pin)
            stamp = {"environment": wanted}
            STAMP.write_text(json.dumps(stamp))
        wheel = build_fork()
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if stamp.get("fork") != digest:
            pip("install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
            STAMP.write_text(json.dumps({**stamp, "fork": digest}))
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def check_machine() -> None:
    """Refuse a machine on which the install or the first run would fail, before anything is downloaded."""
    if sys.version_info[:2] != (3, 11):
        raise SetupError(
            "Python 3.11 is needed (upstream's release and the locks are for 3.11), and this is "
            f"{sys.version.split()[0]} at {sys.executable}. Install it (Debian or Ubuntu: packages python3.11, "
            "python3.11-venv and python3.11-dev; elsewhere pyenv, conda or your site's modules) and run: "
            "make setup PYTHON=/path/to/python3.11"
        )
    if (sys.platform, os.uname().machine) != ("linux", "x86_64"):
        raise SetupError(f"the locks are for Linux on x86_64, and this is {sys.platform} on {os.uname().machine}")
    missing = []
    if shutil.which("g++") is None:
        missing.append("a C++ compiler (package g++)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append("Python's headers (package python3-dev)")
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        missing.append("Python's venv module (package python3-venv)")
    if missing:
        raise SetupError(
            f"missing: {', '.join(missing)}. torch.compile and DeepSpeed's operators need them in runs that use these. "
            "Install them (Debian or Ubuntu: apt-get install g++ python3-dev python3-venv), then run this again."
        )


def torch_pin() -> str:
    """torch's version as pyproject.toml pins it."""
    import tomllib  # not there in the older Pythons that check_machine turns away

    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pins = [line[len("torch==") :] for line in dependencies if line.startswith("torch==")]
    if len(pins) != 1:
        raise SetupError("pyproject.toml: [project] dependencies must pin torch once, as torch==VERSION")
    return pins[0]


def environment_digest(pin: str) -> str:
    """SHA-256 of what the environment is made from: the lock, torch's version and the interpreter."""
    parts = [LOCK.read_bytes(), pin.encode(), sys.version.encode(), sys.base_prefix.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_stamp() -> dict[str, str]:
    """What the last complete setup installed; empty when there was none or the environment is broken."""
    if not (PYTHON.exists() and STAMP.exists()):
        return {}
    return json.loads(STAMP.read_text())


def install_environment(pin: str) -> None:
    """Create .venv if need be, then torch, then all that the lock holds."""
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < NEEDED_GIB:
        raise SetupError(f"{free:.1f} GiB free in {ROOT}, and the environment needs {NEEDED_GIB}: make room")
    start = time.monotonic()
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    STAMP.unlink(missing_ok=True)
    say(f"environment in {VENV} (pip's output: {LOG})")
    if interpreter_of_venv() != [sys.base_prefix, sys.version]:
        run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    install_torch(pin)
    # Source packages are built with the locked setuptools, never with one that pip would fetch for the build.
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as tools:
        tools.write(locked("setuptools"))
        tools.flush()
        pip("install", "--require-hashes", "--no-deps", "-r", tools.name)
    say("everything else, from containers/locks/cpu.txt (a few minutes the first time)")
    pip("install", "--require-hashes", "--no-deps", "--no-build-isolation", "--no-compile", "-r", str(LOCK))
    compile_modules()
    say(f"environment ready after {time.monotonic() - start:.0f} s")


def compile_modules() -> None:
    """Compile everything on all cores, where pip would use one.

    A run imports the same large packages in five processes at once, and where PYTHONDONTWRITEBYTECODE is set none of
    them keeps what it compiled: start-up then takes three times as long, every time.
    """
    say("compiling modules")
    # Some packages ship files for other versions of Python, which do not compile; nobody imports them.
    subprocess.run(
        [str(PYTHON), "-m", "compileall", "-q", "-j", "0", str(VENV / "lib")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def interpreter_of_venv() -> list[str] | None:
    """Prefix and version of the Python that .venv stands on; None when there is none that runs."""
    if not PYTHON.exists():
        return None
    probe = "import json, sys; print(json.dumps([sys.base_prefix, sys.version]))"
    done = subprocess.run([str(PYTHON), "-c", probe], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def install_torch(pin: str) -> None:
    """Install torch's CPU build of exactly this version; refuse another before it is downloaded where pip can tell."""
    index = os.environ.get("TORCH_INDEX")
    source = ["--index-url", index] if index else []
    say(f"torch {pin}, CPU build, from {'TORCH_INDEX' if index else 'where pip is configured to look'}")
    if torch_fault(pin) is None:
        return
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        pip(
            "install", "--dry-run", "--ignore-installed", "--no-deps", "--report", str(report), *source, f"torch=={pin}"
        )
        requires = json.loads(report.read_text())["install"][0]["metadata"].get("requires_dist", [])
    if any(line.startswith(("nvidia-", "cuda-")) for line in requires):
        raise SetupError(no_cpu_build("what pip finds there is a CUDA build"))
    pip("install", "--no-deps", "--no-compile", "--force-reinstall", *source, f"torch=={pin}")
    if fault := torch_fault(pin):
        raise SetupError(no_cpu_build(fault))


def torch_fault(pin: str) -> str | None:
    """What is wrong with the torch in .venv; None when it is a CPU build of exactly the pinned version."""
    # Its version file is read and not `import torch`, which needs packages that are installed after it.
    found = glob(str(VENV / "lib" / "python3*" / "site-packages" / "torch" / "version.py"))
    if not found:
        return "there is none"
    built = runpy.run_path(found[0])
    if built["__version__"].split("+")[0] != pin:
        return f"what is installed is torch {built['__version__']}"
    other = [name for name in ("cuda", "hip", "xpu") if built.get(name)]
    return f"torch {built['__version__']} is built for {other[0]} {built[other[0]]}" if other else None


def no_cpu_build(fault: str) -> str:
    return (
        f"a CPU build of torch {torch_pin()} is needed, but {fault}. Name the index that holds CPU builds (the install "
        "page of PyTorch's site gives it under 'CPU'; a site may have a mirror): make setup TORCH_INDEX=URL"
    )


def locked(package: str) -> str:
    """The entry of one package in the lock, with its hashes."""
    entry = re.search(rf"^{re.escape(package)}==(?:.*\\\n)+.*\n", LOCK.read_text(), re.MULTILINE)
    if entry is None:
        raise SetupError(f"{LOCK} has no entry for {package}: run `make lock`")
    return entry.group()


def build_fork() -> Path:
    """Build the fork (seconds when nothing changed) and return its wheel for development."""
    if subprocess.run([str(PYTHON), "-m", "patches", "build"], cwd=ROOT).returncode:
        raise SetupError("the fork was not built, see above")
    wheels = list((ROOT / "build" / "dist" / "editable").glob("openrlhf-*.whl"))
    if len(wheels) != 1:
        raise SetupError(
            f"build/dist/editable should hold one wheel, and holds {len(wheels)}: delete build/, run this again"
        )
    return wheels[0]


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def pip(*arguments: str) -> None:
    run([str(PYTHON), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments])


def run(command: list[str]) -> None:
    """Run a command with its output in the log; on failure show the log's end and what it means."""
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        start = log.tell()
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        output = LOG.read_bytes()[start:].decode(errors="replace")
        print("\n".join(output.splitlines()[-15:]), file=sys.stderr)
        raise SetupError(f"`{' '.join(command[:5])} ...` failed. {meaning(output)} The whole output is in {LOG}.")


def meaning(output: str) -> str:
    """What the output of a failed pip says, in one sentence with what to do."""
    known = {
        r"No space left on device|Errno 28": f"The disk is full: make room for {NEEDED_GIB} GiB (and see TMPDIR).",
        r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Max retries|SSLError|ProxyError": (
            "The package index did not answer: check the network, the proxy and pip's configuration (pip config list)."
        ),
        r"DO NOT MATCH THE HASHES": "A package is not the one that was locked: do not use it, check where pip looks.",
        r"No matching distribution|Could not find a version": (
            "The index that pip asks lacks this version or did not answer: check the network, pip's configuration "
            "(pip config list) and, for torch, TORCH_INDEX."
        ),
    }
    return next((text for pattern, text in known.items() if re.search(pattern, output)), "See the lines above.")


if __name__ == "__main__":
    sys.exit(main())
