"""Watches of a session: what would be wrong in silence in a loop of the user's own.

A session cannot know what a loop means. It looks where a loop that is right on one process is wrong
on several, or after a resume, and warns. No watch changes a result.

| when | what is looked for |
|---|---|
| in a step | a loss, its mean and its gradients, of one process alone (`first_step.py`) |
| in an epoch | what the loop carries on, by its code and its values (`first_epoch.py`) |
| before the second one | whether data sets were told their epoch (`data_epochs.py`) |
| before its first batch | what a resumed run would do again (`epoch_beginning.py`) |
| in an evaluation | scores of samples that all processes have (`score_watch.py`) |
| after one | counts of one process that are printed (`printed_counts.py`) |
| at a checkpoint | what it would lose, or has of one process alone (`checkpoint_watch.py`) |

Other modules of a session meet most of them through `Watches` (`watches.py`).
"""
