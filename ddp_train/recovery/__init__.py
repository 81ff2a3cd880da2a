"""Recovery: a failure ends all processes, others start anew, and no step is lost.

The launcher owns memory that outlives its workers: an anonymous file on CPUs
(`resilience/kept_memory.py`), allocations of each GPU (`resilience/held_devices.py`). After each
step every rank keeps its share of weights, moments and averages there, and what it alone has
(`run_keeper.py`; on GPUs at a pace, `pace.py`). A mark is written last. A step that all ranks of a
host have marked is whole, whatever happens to them afterwards. A session keeps the same, where its
checkpoint could be saved (`sessions/session_keeper.py`, `packing.py`, `kept_session.py`).

| what happens | what the launcher does |
|---|---|
| a worker is killed, or several, or all | ends the others by SIGKILL; saves; starts all anew |
| a worker raises, or is out of memory, or exits | the same |
| a worker hangs, or is stopped | the same, after launch.timeout_seconds |
| the same failure comes three times without a step in between | saves, and ends the run |
| no restart is left, or the failure would come again (exit codes 2, 65, 73) | the same |
| it is asked for another number of processes, or to stop | workers agree on a step and save it |
| it is killed itself | its memory is gone with it: the next command resumes from a checkpoint |
| a host of several is lost | each other host saves what its ranks have kept (`lost_host.py`) |

What is saved is an ordinary checkpoint of the last whole step (`kept_checkpoint.py`): rank 0 of the
next attempt does it before it looks for one, or a process of its own where no attempt follows. What
was begun after that step, by an update that was cut off or by hooks, does not exist. A loss or a
weight that is not finite is never saved: the run resumes from the checkpoint before.
"""
