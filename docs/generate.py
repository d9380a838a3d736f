"""Writes docs/cli.md, database.md and targets.md, and a table of memory-model.md, from the code: `make docs`.

With --check it writes nothing, and exits with 1 where a page is not what it would write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import sqlalchemy

from tuner.cli.main import group
from tuner.memory.cuda_rules import CATALOGUE
from tuner.memory.targets import Target, profile_names, resolve_target
from tuner.memory.workspaces import cublas_workspace_bytes
from tuner.store.schema import metadata
from tuner.store.views import SAYS, VIEWS, meaning_of, unit_of
from tuner.units import MIB, format_bytes

DOCS = Path(__file__).parent
_WIDTH = 96

# Each runs as it stands on SQLite and on PostgreSQL; a test does so.
QUERIES = {
    "All trials, smallest first": (
        "SELECT number, outcome, value, peak_bytes, predicted_bytes\nFROM tuner_trials\n"
        "WHERE study = 'digits_cnn' ORDER BY peak_bytes"
    ),
    "The front": (
        "SELECT number, value, peak_bytes\nFROM tuner_pareto\nWHERE study = 'digits_cnn' ORDER BY peak_bytes"
    ),
    "The best trial in half a gibibyte": (
        "SELECT number, value, peak_bytes, params\nFROM tuner_pareto\n"
        "WHERE study = 'digits_cnn' AND peak_bytes <= 536870912\nORDER BY value DESC LIMIT 1"
    ),
    "What became of the trials": (
        "SELECT study, outcome, count(*) AS trials, sum(seconds) AS seconds\nFROM tuner_trials\n"
        "GROUP BY study, outcome ORDER BY study, trials DESC"
    ),
    "How far predictions are off, and how often the band was right": (
        "SELECT study, mix, count(*) AS trials, avg(abs(error)) AS mean_error,\n"
        "       avg(CASE WHEN in_band THEN 1.0 ELSE 0.0 END) AS coverage\n"
        "FROM tuner_predictions WHERE error IS NOT NULL\nGROUP BY study, mix"
    ),
    "Launches that did not fit although they were thought to": (
        "SELECT study, number, fits_probability, predicted_bytes, budget_bytes\nFROM tuner_predictions\n"
        "WHERE outcome = 'out_of_memory' AND verdict = 'launch'"
    ),
    "Which phase peaks": (
        "SELECT phase, count(*) AS trials, avg(1.0 * phase_bytes / peak_bytes) AS share_of_peak\n"
        "FROM tuner_memory WHERE outcome = 'completed'\nGROUP BY phase ORDER BY share_of_peak DESC"
    ),
    "A metric at the third epoch": (
        "SELECT number, value\nFROM tuner_metrics\n"
        "WHERE study = 'digits_cnn' AND name = 'accuracy' AND epoch = 3\nORDER BY value DESC"
    ),
    "How much of what was set aside was used, by device": (
        "SELECT device, count(*) AS launches, avg(waiting_seconds) AS waiting_seconds,\n"
        "       avg(1.0 * peak_bytes / reservation_bytes) AS share_used\n"
        "FROM tuner_devices GROUP BY device"
    ),
    "What was turned away before a trial was spent": (
        "SELECT study, count(*) AS configurations, min(predicted_bytes) AS smallest_bytes\n"
        "FROM tuner_rejections GROUP BY study"
    ),
}


DUCKDB_QUERY = "SELECT outcome, count(*) AS trials, median(peak_bytes) AS median_bytes\nFROM 'trials.parquet' GROUP BY outcome"


def cli_page() -> Iterator[str]:
    """Yield docs/cli.md: every command's help, as it prints it."""
    yield "# The command line\n"
    yield "Generated from the commands (`make docs`); `tuner COMMAND --help` prints the same.\n"
    yield from _help(group, ["tuner"])
    yield "## Settings\n"
    yield (
        "Each is taken from the flag, else from `TUNER_NAME` (`TUNER_BUDGET=6GiB`), else from `tuner.toml` or\n"
        '`[tool.tuner]` in `pyproject.toml` of the current folder (`budget = "6GiB"`), else from its default.\n'
    )
    yield "| setting | meaning |\n|---|---|"
    from tuner.settings import SPECS

    yield "\n".join(f"| `{name}` | {spec.help} |" for name, spec in SPECS.items()) + "\n"


def _help(command: click.Command, path: list[str]) -> Iterator[str]:
    context = click.Context(
        command, info_name=" ".join(path), terminal_width=_WIDTH, max_content_width=_WIDTH
    )
    yield f"## {' '.join(path)}\n\n```\n{command.get_help(context).strip()}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _help(child, [*path, name])


def database_page() -> Iterator[str]:
    """Yield docs/database.md: the views, the tables with each column's meaning, and queries."""
    yield "# The database\n"
    yield (
        "Generated from the models (`make docs`). One database holds Optuna's tables and ours (prefix `tuner_`):\n"
        "SQLite by default, PostgreSQL for teams. Sizes are bytes, durations seconds, moments UTC.\n"
    )
    yield "## Views\n"
    yield (
        "What people and scripts query. A version of vram-tuner may add views and columns; those that are here keep\n"
        "their names and meanings. They read our tables only, never Optuna's.\n"
    )
    yield "| view | rows |\n|---|---|"
    yield "\n".join(f"| [`{name}`](#{name}) | {says} |" for name, says in SAYS.items()) + "\n"
    for view, columns in _columns_of_views().items():
        yield f"### {view}\n\n{SAYS[view].capitalize()}.\n\n| column | unit | meaning |\n|---|---|---|"
        yield "\n".join(f"| `{c}` | {unit_of(c)} | {meaning_of(view, c)} |" for c in columns) + "\n"
    yield "## Tables\n"
    for table in metadata.sorted_tables:
        yield f"### {table.name}\n\n| column | type | meaning |\n|---|---|---|"
        rows = (f"| `{c.name}` | {str(c.type).lower()} | {c.comment or ''} |" for c in table.columns)
        yield "\n".join(rows) + "\n"
    yield "## Queries\n"
    yield (
        "`tuner query 'SELECT …'` runs one statement, read-only, on the database of `--storage` or `TUNER_STORAGE`, and\n"
        "prints a table, JSON or CSV. The same statements work in `sqlite3 tuner.db`, `psql URL`, and from pandas:\n"
    )
    yield '```python\npandas.read_sql("SELECT * FROM tuner_trials", "sqlite:///tuner.db")\n```\n'
    yield "DuckDB reads what `tuner export digits_cnn -o trials.parquet` writes:\n"
    yield f"```sql\n{DUCKDB_QUERY}\n```\n"
    for title, query in QUERIES.items():
        yield f"{title}:\n\n```sql\n{query}\n```\n"


def _columns_of_views() -> dict[str, list[str]]:
    """Return each view's columns, as a database has them."""
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.begin() as connection:
        metadata.create_all(connection)
        for statement in VIEWS.values():
            connection.exec_driver_sql(statement)
        found = sqlalchemy.inspect(connection)
        columns = {view: [str(column["name"]) for column in found.get_columns(view)] for view in VIEWS}
    engine.dispose()
    return columns


def targets_page() -> Iterator[str]:
    """Yield docs/targets.md: every GPU that can be predicted for, and where its figures come from."""
    yield "# Targets\n"
    yield (
        "Generated from `tuner/memory/targets.toml` (`make docs`); `tuner targets` prints the same for your machine.\n\n"
        "`tuner predict STUDY --target rtx-3090` predicts for a GPU that need not be there. Other spellings are understood\n"
        "(`3090`, `RTX3090`, `NVIDIA GeForce RTX 3090`), and `sm_90` stands for any GPU of compute capability 9.0.\n\n"
        "* **Capacity** is what PyTorch can get on Linux: 0 to 3.5 % less than `nvidia-smi` shows. Drivers differ; of the reports\n"
        "  cited the lowest is taken. Windows and WSL report the nominal size.\n"
        "* **Workspace** is what cuBLAS keeps per thread, inside the allocator; a training process has two. It follows from the\n"
        "  compute capability: 8,519,680 B below 9.0, 32 MiB from 9.0 on. `CUBLAS_WORKSPACE_CONFIG` takes precedence.\n"
        "* **Context** is what a process takes on the GPU before its first tensor, ± one standard deviation. Where nobody has\n"
        "  published it, it is predicted from a range and the band is wider.\n\n"
        "On a machine with a GPU, `tuner doctor` measures the context once, in a child process, for this host, device, driver\n"
        "and build of PyTorch; predictions for `cuda:N` then use it, and PyTorch's own figure for the capacity.\n"
    )
    known = [resolve_target(name) for name in profile_names()]
    yield "| target | GPU | capacity | compute capability | workspace | context |\n|---|---|---|---|---|---|"
    yield "\n".join(_target_row(target) for target in known) + "\n"
    yield '## Sources\n\n`owner/name#N` is an issue or pull request on GitHub; "torch" is `total_memory` as printed in public logs.\n'
    yield "| target | capacity | context |\n|---|---|---|"
    for target in known:
        context = target.context_source if target.context_measured else "not measured"
        yield f"| `{target.name}` | {target.capacity_source} | {context} |"
    yield f"\nContext where it is not measured: {resolve_target('cuda').context_source.partition('; ')[2]}."


def _target_row(target: Target) -> str:
    assert target.context_bytes is not None
    assert target.compute_capability is not None
    workspace_bytes = cublas_workspace_bytes(target.compute_capability, environment={})
    context = f"{target.context_bytes / MIB:.0f} ± {target.context_spread_bytes / MIB:.0f} MiB"
    return (
        f"| `{target.name}` | {target.gpu} | {format_bytes(target.capacity_bytes)} | {'{}.{}'.format(*target.compute_capability)} "
        f"| {workspace_bytes / MIB:.4g} MiB | {context if target.context_measured else 'not measured'} |"
    )


_BEGIN, _END = "<!-- rules: generated -->", "<!-- rules: end -->"


def memory_model_page() -> Iterator[str]:
    """Yield docs/memory-model.md with its table of CUDA rules renewed; the rest is written by hand."""
    text = (DOCS / "memory-model.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    yield f"{before}{_BEGIN}\n\n| rule | what it changes | source | not seen |\n|---|---|---|---|"
    yield from (f"| {' | '.join(rule)} |" for rule in CATALOGUE)
    yield f"\n{_END}{rest.partition(_END)[2]}"


def main() -> None:
    """Write the pages, or check them."""
    pages = {
        "cli.md": cli_page,
        "database.md": database_page,
        "targets.md": targets_page,
        "memory-model.md": memory_model_page,
    }
    stale = []
    for name, page in pages.items():
        text = "\n".join(page()).rstrip() + "\n"
        path = DOCS / name
        if "--check" in sys.argv:
            stale += [name] if not path.exists() or path.read_text(encoding="utf-8") != text else []
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.exit(f"not up to date, run make docs: {', '.join(stale)}")


if __name__ == "__main__":
    main()
