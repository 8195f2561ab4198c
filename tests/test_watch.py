"""The watch over actors: what is a death, and what only looks like one."""

import pytest
import ray

from openrlhf.fixes import watch

UNAVAILABLE = ray.exceptions.ActorUnavailableError("keepalive timeout", actor_id=None)
QUESTION_FAILED = ray.exceptions.RayTaskError("_health", "a traceback", ValueError("no such attribute"))


def answering(monkeypatch, answer):
    """Inject an answer to the question of health: a broken connection cannot be had on demand."""

    def get(ref):
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(watch.ray, "get", get)


@pytest.mark.parametrize("answer", [None, UNAVAILABLE, QUESTION_FAILED])
def test_neither_health_nor_a_broken_connection_nor_a_failed_question_is_a_death(monkeypatch, answer):
    answering(monkeypatch, answer)
    assert watch._diagnose("PolicyModelActor 1", None) is None


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("its engine core has died", "vLLM engine 0: its engine core has died"),
        (ray.exceptions.ActorDiedError(), "vLLM engine 0: The actor died unexpectedly before finishing this task."),
    ],
)
def test_a_death_is_told_with_its_name_and_reason(monkeypatch, answer, told):
    answering(monkeypatch, answer)
    assert watch._diagnose("vLLM engine 0", None) == told
