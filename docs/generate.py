"""Writes docs/cli.md, database.md and targets.md, and a table of memory-model.md, from the code: `make docs`.

With --check it writes nothing, and exits with 1 where a page is not what it would write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from tuner.cli.main import group
from tuner.memory.cuda_rules import CATALOGUE
from tuner.memory.targets import Target, profile_names, resolve_target
from tuner.memory.workspaces import cublas_workspace_bytes
from tuner.store.schema import VIEWS, metadata
from tuner.units import MIB, format_bytes

DOCS = Path(__file__).parent
_WIDTH = 96

_QUERIES = {
    "All trials, smallest first": (
        "select number, outcome, value, peak_bytes, predicted_bytes from tuner_trials order by peak_bytes"
    ),
    "The front": "select number, value, peak_bytes from tuner_pareto where study = 'digits_cnn' order by peak_bytes",
    "How far predictions are off, by study": (
        "select study, count(*), avg(abs(1.0 * predicted_bytes / peak_bytes - 1)) as mean_error "
        "from tuner_trials where outcome = 'completed' group by study"
    ),
    "What became of the trials": "select study, outcome, count(*) from tuner_trials group by study, outcome",
}


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
    yield "`tuner_trials`: a row per trial, with its study. `tuner_pareto`: the trials on each study's front.\n"
    for name, statement in VIEWS.items():
        yield f"### {name}\n\n```sql{statement}\n```\n"
    yield "## Tables\n"
    for table in metadata.sorted_tables:
        yield f"### {table.name}\n\n| column | type | meaning |\n|---|---|---|"
        rows = (f"| `{c.name}` | {str(c.type).lower()} | {c.comment or ''} |" for c in table.columns)
        yield "\n".join(rows) + "\n"
    yield "## Queries\n"
    for title, query in _QUERIES.items():
        yield f"{title}:\n\n```sql\n{query}\n```\n"
    yield 'From a shell: `sqlite3 tuner.db "select …"` or `psql URL -c "select …"`; from pandas:\n'
    yield '```python\npandas.read_sql("select * from tuner_trials", "sqlite:///tuner.db")\n```'


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
