"""`tuner clean`: remove run folders and checkpoints that are not needed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.options import storage_option, storage_url
from tuner.settings import Setting, resolve
from tuner.units import format_bytes

if TYPE_CHECKING:
    from tuner.store.rows import StudyRecord


@click.command("clean", short_help="Remove run folders and checkpoints that are not needed.")
@storage_option
@click.option("--runs-dir", metavar="DIR", help="Where the run folders are  [default: tuner-runs]")
@click.option(
    "--keep-checkpoints", metavar="WHICH", help="Weights to keep: front, all or none  [default: front]"
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def command(storage: str | None, dry_run: bool, **flags: Any) -> None:
    """Remove the run folders of deleted studies, and weights that are not to be kept.

    Folders that do not look like ours (no request.json) are left alone, and so are the folders of
    studies that are in the database.
    """
    from tuner.search.checkpoints import prune_checkpoints
    from tuner.store.opening import writing

    setting = resolve(flags, ["runs_dir", "keep_checkpoints"])
    found = _run_folders(Path(setting["runs_dir"].value))  # before the database: new trials are safe
    with writing(storage_url(storage)) as (reader, writer, _):
        studies = reader.studies()
        used = {Path(t.run_folder).resolve() for s in studies for t in reader.trials(s.id) if t.run_folder}
        freed_bytes = sum(
            prune_checkpoints(
                reader, writer, study, _keep(setting["keep_checkpoints"], study), dry_run=dry_run
            )
            for study in studies
        )
    orphans = [path for path in found if path.resolve() not in used]
    for path in orphans:
        freed_bytes += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if not dry_run:
            shutil.rmtree(path)
            if not any(path.parent.iterdir()):
                path.parent.rmdir()
    would = "would remove" if dry_run else "removed"
    click.echo(f"{would} {len(orphans)} run folders, {format_bytes(freed_bytes)}", err=True)


def _keep(asked: Setting, study: StudyRecord) -> str:
    """Return which weights to keep: as asked, else as the study was run with."""
    stored = study.settings.get("keep_checkpoints", {}).get("value", asked.value)
    return str(asked.value if asked.origin != "default" else stored)


def _run_folders(runs_dir: Path) -> list[Path]:
    return sorted(request.parent for request in runs_dir.glob("*/*/request.json"))
