"""Which weights are kept: those of the trials on the front, all, or none."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tuner.execution.run_folder import RunFolder
from tuner.store.reader import Reader
from tuner.store.rows import StudyRecord
from tuner.store.writer import Writer


def prune_checkpoints(
    reader: Reader, writer: Writer, study: StudyRecord, keep: str, *, dry_run: bool = False
) -> int:
    """Remove the weights that are not to be kept; return how many bytes were freed.

    Args:
        reader: Reads the study.
        writer: Notes what is gone.
        study: The study.
        keep: `front`, `all` or `none`.
        dry_run: Only count.
    """
    if keep == "all":
        return 0
    trials = reader.trials(study.id)  # before the front: what ends meanwhile is left alone
    kept = {trial.number for trial in reader.front(study.id)} if keep == "front" else set()
    freed_bytes = 0
    for trial in trials:
        if trial.is_running or trial.run_folder is None or trial.number in kept:
            continue
        # A trial that was cut short reported no checkpoint, but may have left one.
        path = RunFolder(Path(trial.run_folder)).checkpoint
        with contextlib.suppress(FileNotFoundError):  # or another driver has just removed it
            size_bytes = path.stat().st_size
            if not dry_run:
                path.unlink()
            freed_bytes += size_bytes
        if trial.checkpoint is not None and not dry_run:
            writer.forget_checkpoint(trial.id)
    return freed_bytes
