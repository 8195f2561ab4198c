"""Reading `groups/draws.jsonl`: the samples that were generated, those of filtered prompts among them."""

from pathlib import Path

from slurm.groups import last_steps, read_rows


def generated_by_step(draws: Path, updates: Path) -> dict[int, int] | None:
    """For each training step, how many samples had been generated in all when its batch was complete.

    `updates` (`groups/updates.jsonl`) tells which draws a step learnt from; the last step counts all draws, also those
    that came to no batch, so that this is the whole bill of a run that has ended. None where there are no records, or
    where a step learnt from a draw that is not recorded.
    """
    if not (draws.exists() and updates.exists()):
        return None
    calls = _calls(draws)
    call_of = {draw: call for call, counts in calls.items() for draw in counts}
    learnt = {step: [group["draw"] for group in row["groups"]] for step, row in last_steps(updates).items()}
    if not learnt or any(draw not in call_of for drawn in learnt.values() for draw in drawn):
        return None
    bill, reached = {}, -1
    for step in sorted(learnt):
        reached = max([reached, *(call_of[draw] for draw in learnt[step])])
        bill[step] = sum(sum(counts.values()) for call, counts in calls.items() if call <= reached)
    bill[max(bill)] = sum(sum(counts.values()) for counts in calls.values())
    return bill


def _calls(path: Path) -> dict[int, dict[int, int]]:
    """The samples of each draw, by call of the generator; an attempt replaces all calls from its first one on."""
    calls: dict[int, dict[int, int]] = {}
    for row in read_rows(path):
        if row["kind"] == "settings":
            calls = {call: counts for call, counts in calls.items() if call < row["call"]}
        else:
            calls.setdefault(row["call"], {})[row["draw"]] = int(row["count"])
    return calls
