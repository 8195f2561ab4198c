"""Ends a run whose actor or engine has died, with a reason, instead of letting its peers wait for it.

Upstream notices a death only where it happens to wait for that actor's answer; a peer of a collective, of the
rendezvous of weight sync or of a queue waits for ever. Each process that creates actors watches them from a thread.
"""

import _thread
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import ray

T = TypeVar("T")

INTERVAL_SECONDS = 5.0
GRACE_SECONDS = 15.0


class _Watch:
    """Holds one unanswered call per actor; the call of a dead actor fails at once, that of a busy one just waits."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self._actors: list[tuple[str, Any]] = []
        self._calls: dict[ray.ObjectRef, tuple[str, Any]] = {}
        self._lock = threading.Lock()
        self._main_thread_reports = False
        self._over = False
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def add(self, name: str, actor: Any) -> None:
        with self._lock:
            self._actors.append((name, actor))

    def guard(self) -> None:
        """From now on the main thread is interrupted at a failure and reports it; otherwise the process just exits."""
        self._main_thread_reports = True

    def end(self) -> None:
        """The run is over, well or not: act no more."""
        self._over = True

    def look(self, seconds: float) -> str | None:
        """Ask every actor how it is and wait this long for answers; what is wrong with the first that is not well."""
        with self._lock:
            waiting = {id(actor) for _, actor in self._calls.values()}
            for name, actor in self._actors:
                if id(actor) not in waiting:
                    self._calls[actor.__ray_call__.remote(_health)] = (name, actor)
            calls = list(self._calls)
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=seconds) if calls else ([], [])
            for ref in ready:
                name, _ = self._calls.pop(ref)
                self.failure = self.failure or _diagnose(name, ref)
        return self.failure

    def _run(self) -> None:
        told = False
        while self.failure is None:
            time.sleep(INTERVAL_SECONDS)
            if self._over:
                return
            try:
                if ray.is_initialized():
                    self.look(0)
            except Exception as error:  # not to be able to look is no death, and must not end the looking
                if not told:
                    print(f"the watch over actors could not look: {error}", file=sys.stderr, flush=True)
                told = True
        if self._main_thread_reports:
            if not self._over:
                _thread.interrupt_main()
            time.sleep(GRACE_SECONDS)
        _say_and_exit(self.failure)


def _health(actor: Any) -> str | None:
    """Runs inside the actor: what is wrong with it. An engine's core is a process of its own and can die alone."""
    llm = getattr(actor, "llm", None)
    return "its engine core has died" if llm is not None and getattr(llm, "errored", False) else None


def _diagnose(name: str, ref: ray.ObjectRef) -> str | None:
    try:
        trouble = ray.get(ref)
    except ray.exceptions.ActorUnavailableError:
        return None  # a broken connection, which may come back; it is asked again
    except ray.exceptions.RayActorError as error:
        trouble = reason(error)
    except ray.exceptions.RayError:
        return None  # the question failed, not the actor
    return f"{name}: {trouble}" if trouble else None


_watch: _Watch | None = None


def watched(subject: T, name: str) -> T:
    """Watch an actor, or a list of them, from now on; returns it unchanged."""
    global _watch
    _watch = _watch or _Watch()
    for index, actor in enumerate(subject if isinstance(subject, list) else [subject]):
        _watch.add(f"{name} {index}" if isinstance(subject, list) else name, actor)
    return subject


def watched_group(group: T) -> T:
    """Watch the ranks of one of upstream's actor groups from now on; returns the group unchanged."""
    watched(group._actor_handlers, group.ray_actor_type.__ray_metadata__.class_name)  # type: ignore[attr-defined]
    return group


def reason(error: BaseException) -> str:
    """The root cause of an error that Ray carried over from other processes, on one line."""
    seen = error
    while isinstance(getattr(seen, "cause", None), BaseException):
        seen = seen.cause  # type: ignore[attr-defined]
    # Some errors that Ray rebuilds carry their text once more for each process they passed through, as a tuple.
    text = str(seen.args[0]) if seen.args and isinstance(seen.args[0], str) else str(seen)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(seen, ray.exceptions.RayError):
        return lines[-1].split(" Some common causes")[0] if lines else type(seen).__name__
    return f"{type(seen).__name__}: {lines[0]}" if lines else type(seen).__name__


def guarded(train: Callable[[Any], None], args: Any) -> None:
    """Run the driver; a failure ends with one line ``run failed: …`` and exit status 1, and Ray is shut down.

    Raises:
        SystemExit: with status 1 after a failure.
    """
    global _watch
    _watch = _watch or _Watch()
    _watch.guard()
    try:
        failure = _attempt(train, args, _watch)
    except KeyboardInterrupt:
        failure = _watch.failure
        if failure is None:
            raise
    _watch.end()
    if failure is not None:
        last_resort = threading.Timer(GRACE_SECONDS, _say_and_exit, (failure,))
        last_resort.daemon = True
        last_resort.start()
        ray.shutdown()
        _say(failure)
        raise SystemExit(1)


def _attempt(train: Callable[[Any], None], args: Any, watch: _Watch) -> str | None:
    try:
        train(args)
    except Exception as error:
        traceback.print_exc()
        # A death shows first as an error of whoever was talking to the dead. The first look clears older answers away.
        death = (watch.look(0) or watch.look(INTERVAL_SECONDS)) if ray.is_initialized() else None
        return death or reason(error)
    return None


def _say_and_exit(failure: str) -> None:
    _say(failure)
    os._exit(1)


def _say(failure: str) -> None:
    print(f"run failed: {failure}", file=sys.stderr, flush=True)
