"""Which weights are kept: those of the trials on the front, all, or none."""

from __future__ import annotations

from pathlib import Path

from tuner.store.reader import Reader
from tuner.store.rows import StudyRecord
from tuner.store.writer import Writer


def prune_checkpoints(reader: Reader, writer: Writer, study: StudyRecord, keep: str) -> int:
    """Remove the weights that are not to be kept; return how many bytes were freed.

    Args:
        reader: Reads the study.
        writer: Notes what is gone.
        study: The study.
        keep: `front`, `all` or `none`.
    """
    if keep == "all":
        return 0
    kept = {trial.number for trial in reader.front(study.id)} if keep == "front" else set()
    freed_bytes = 0
    for trial in reader.trials(study.id):
        if trial.checkpoint is None or trial.run_folder is None or trial.number in kept:
            continue
        path = Path(trial.run_folder) / trial.checkpoint
        if path.is_file():
            freed_bytes += path.stat().st_size
            path.unlink()
        writer.forget_checkpoint(trial.id)
    return freed_bytes
