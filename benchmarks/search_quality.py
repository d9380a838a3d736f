"""What knowing memory beforehand is worth: searches of real tables under caps, at equal launches.

7 tables × caps at the 10, 25 and 50 % quantile of size × seeds, 60 launches each:

* one objective: regret, (best feasible score − best found) / (best feasible − median feasible);
* two: the area under the feasible hypervolume over launches, as a share of the whole front's.

Prints medians, ranks and tests (Wilcoxon's signed ranks over seeds, Holm's correction over the pairs
of table and cap), writes JSON.

Run as: python benchmarks/search_quality.py [--seeds 20] [--only one|two] [--tables …] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from scipy.stats import rankdata, wilcoxon
from statsmodels.stats.multitest import multipletests
from threadpoolctl import threadpool_limits

from benchmarks.hpo_tables import NAMES, QUANTILES, Table, table
from benchmarks.search_policies import LAUNCHES, ONE_OBJECTIVE, TWO_OBJECTIVES, Predictor, Run, search
from tuner.search.sampling.hypervolume import front_of
from tuner.search.sampling.memory_filter import MemoryFilter
from tuner.search.sampling.models import ScoreModel

PLAIN, PRUNE, FILTER, AWARE = (
    "plain Optuna (OOM is FAIL)",
    "predict and prune",
    "filter",
    "memory-aware",
)
SLOW = {"GP, constraint": 1, "memory-aware, ±10 %": 5, "memory-aware, ±20 %": 5}  # seeds
_NOTHING = 10.0  # regret of a search that launched nothing that fits: worse than any other
Job = tuple[str, str, float, str, int]


def jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """Yield every search: objectives, table, quantile, policy, seed."""
    for objectives, policies in (("one", ONE_OBJECTIVE), ("two", TWO_OBJECTIVES)):
        if arguments.only not in (None, objectives):
            continue
        for policy in policies:
            for seed in range(min(arguments.seeds, SLOW.get(policy, arguments.seeds))):
                for name in arguments.tables:
                    for quantile in QUANTILES:
                        yield objectives, name, quantile, policy, seed


def run(job: Job) -> tuple[Job, dict[str, float]]:
    """Run one search; return what it reached."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    objectives, name, quantile, policy, seed = job
    data = table(name)
    cap = data.cap(quantile)
    policies = ONE_OBJECTIVE if objectives == "one" else TWO_OBJECTIVES
    torch.set_num_threads(1)  # one search per core
    with threadpool_limits(1):
        found = search(data, cap, policies[policy], seed, two=objectives == "two")
    fits = np.array(found.sizes) <= cap
    reached = regret(data, cap, found) if objectives == "one" else area(data, cap, found)
    return job, {
        "reached": reached,
        "feasible": float(fits.mean()),
        "asks": found.asks,
        "launches": len(found.sizes),
        "ask_seconds": found.seconds / found.asks,
    }


def regret(data: Table, cap: int, found: Run) -> float:
    """Return how far the best launch that fits is from the best there is; less is better."""
    scores = np.array([data.scores[configuration] for configuration in data.feasible(cap)])
    best, middle = scores.max(), np.median(scores)
    reached = [score for size, score in zip(found.sizes, found.scores, strict=True) if size <= cap]
    return float((best - max(reached)) / (best - middle)) if reached else _NOTHING


def area(data: Table, cap: int, found: Run) -> float:
    """Return the mean over launches of the hypervolume's share; more is better.

    The reference point is the cap, and the median score of what fits.
    """
    fitting = data.feasible(cap)
    worst = float(np.median([data.scores[configuration] for configuration in fitting]))
    whole = hypervolume(
        [data.sizes[configuration] for configuration in fitting],
        [data.scores[configuration] for configuration in fitting],
        cap,
        worst,
    )
    shares = [
        hypervolume(found.sizes[:count], found.scores[:count], cap, worst) / whole
        for count in range(1, LAUNCHES + 1)
    ]
    return float(np.mean(shares))


def hypervolume(sizes: list[int], scores: list[float], cap: int, worst: float) -> float:
    """Return the area that the points that fit dominate."""
    memory, score = np.array(sizes, dtype=float), np.array(scores)
    inside = (memory <= cap) & (score > worst)
    if not inside.any():
        return 0.0
    memory, score = front_of(memory[inside], score[inside])
    return float(((np.append(memory[1:], cap) - memory) * (score - worst)).sum())


def summarise(results: dict[Job, dict[str, float]], objectives: str) -> dict[str, Any]:
    """Return medians, ranks and tests."""
    sign = 1 if objectives == "one" else -1
    cells: dict[tuple[str, float], dict[str, dict[int, dict[str, float]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for (which, name, quantile, policy, seed), reached in results.items():
        if which == objectives:
            cells[name, quantile][policy][seed] = reached
    policies = list(ONE_OBJECTIVE if objectives == "one" else TWO_OBJECTIVES)
    policies = [policy for policy in policies if all(policy in cell for cell in cells.values())]
    medians = np.array(
        [
            [np.median([one["reached"] for one in cell[policy].values()]) for policy in policies]
            for cell in cells.values()
        ]
    )
    ranks = rankdata(sign * medians, axis=1).mean(axis=0)
    of_all = {
        policy: {
            "rank": float(ranks[index]),
            "median": float(np.median(medians[:, index])),
            **{
                key: float(np.mean([one[key] for cell in cells.values() for one in cell[policy].values()]))
                for key in ("feasible", "asks", "launches", "ask_seconds")
            },
            "most_asks_at_10_percent": max(
                float(np.mean([one["asks"] for one in cell[policy].values()]))
                for (_, quantile), cell in cells.items()
                if quantile == QUANTILES[0]
            ),
        }
        for index, policy in enumerate(policies)
    }
    comparisons = {
        f"{better} against {worse}": compare(cells, better, worse, sign)
        for better, worse in _comparisons(objectives, policies)
    }
    return {
        "policies": of_all,
        "comparisons": comparisons,
        "cells": {
            f"{name} @ {quantile}": {
                policy: {key: [one[key] for one in seeds.values()] for key in ("reached", "feasible", "asks")}
                for policy, seeds in cell.items()
            }
            for (name, quantile), cell in cells.items()
        },
    }


def _comparisons(objectives: str, policies: list[str]) -> list[tuple[str, str]]:
    if objectives == "one":
        wanted = [(FILTER, PLAIN), (FILTER, "constraint after launch"), (FILTER, PRUNE)]
    else:
        wanted = [(AWARE, other) for other in policies if not other.startswith(AWARE)]
    return [pair for pair in wanted if set(pair) <= set(policies)]


def compare(
    cells: dict[tuple[str, float], dict[str, dict[int, dict[str, float]]]],
    better: str,
    worse: str,
    sign: int,
) -> dict[str, Any]:
    """Return on how many pairs of table and cap one policy is better, and how surely."""
    wins, p_values, differences = 0, [], []
    for cell in cells.values():
        seeds = sorted(set(cell[better]) & set(cell[worse]))
        one = sign * np.array([cell[better][seed]["reached"] for seed in seeds])
        other = sign * np.array([cell[worse][seed]["reached"] for seed in seeds])
        difference = float(np.median(one) - np.median(other))
        differences.append(difference)
        wins += difference < 0
        p_values.append(1.0 if (one == other).all() else float(wilcoxon(one, other).pvalue))
    significant = multipletests(p_values, method="holm")[0]
    over_cells = wilcoxon(differences).pvalue if any(differences) else 1.0
    return {
        "pairs": len(differences),
        "better": wins,
        "significantly_better": sum(bool(s) and d < 0 for s, d in zip(significant, differences, strict=True)),
        "significantly_worse": sum(bool(s) and d > 0 for s, d in zip(significant, differences, strict=True)),
        "p_over_pairs": float(over_cells),
    }


def show(objectives: str, summary: dict[str, Any]) -> None:
    """Print a summary at 80 columns."""
    what = "regret" if objectives == "one" else "area"
    title = "one objective" if objectives == "one" else "two objectives"
    print(f"\n{title}: {what} in {LAUNCHES} launches, median over tables and caps")
    print(f"{'policy':<28}{'rank':>6}{what:>9}{'fits':>8}{'asks':>7}{'10 % cap':>9}{'ms/ask':>8}")
    for policy, row in summary["policies"].items():
        print(
            f"{policy:<28}{row['rank']:>6.2f}{row['median']:>9.4f}{row['feasible']:>8.1%}"
            f"{row['asks']:>7.1f}{row['most_asks_at_10_percent']:>9.1f}{1000 * row['ask_seconds']:>8.1f}"
        )
    for pair, found in summary["comparisons"].items():
        print(
            f"{pair}: better on {found['better']} of {found['pairs']} "
            f"({found['significantly_better']} significantly, {found['significantly_worse']} worse), "
            f"p over pairs {found['p_over_pairs']:.1e}"
        )


def pace(trials: int = 500, last: int = 20) -> dict[str, float]:
    """Return the seconds that finding a configuration takes after so many trials, predictions left out."""
    data = table(NAMES[0])
    cap = data.cap(QUANTILES[1])
    found = {}
    for name, policy in (("tpe", TWO_OBJECTIVES[FILTER]), (AWARE, TWO_OBJECTIVES[AWARE])):
        study = optuna.create_study(directions=["maximize", "minimize"])
        sampler = MemoryFilter(
            policy.sampler(0),
            data.suggest,
            Predictor(data, cap, 0.0, 0).forecast,
            budget_bytes=cap,
            seed=0,
            scores=ScoreModel() if policy.aware else None,
        )
        fitting = data.feasible(cap)
        for index in np.random.default_rng(0).choice(len(fitting), trials, replace=False):
            study.enqueue_trial(data.values(fitting[index]))
            trial = study.ask()
            configuration = data.suggest(trial)
            study.tell(trial, [data.scores[configuration], float(data.sizes[configuration])])
            sampler.history.keep(*data.known(configuration))
        study.sampler = sampler
        seconds = []
        for _ in range(last):
            trial = study.ask()
            configuration = data.suggest(trial)
            rehearsal = sampler.rehearsals[trial.number]
            seconds.append(rehearsal.seconds - rehearsal.forecast_seconds)
            study.tell(trial, [data.scores[configuration], float(data.sizes[configuration])])
        found[name] = float(np.mean(seconds))
    return found


def main() -> None:
    """Run everything, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", choices=["one", "two"])
    parser.add_argument("--tables", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[Job, dict[str, float]] = {}
    wanted, started = list(jobs(arguments)), time.monotonic()
    pool = ProcessPoolExecutor(arguments.processes)
    try:
        for count, (job, reached) in enumerate(pool.map(run, wanted, chunksize=21), 1):
            results[job] = reached
            if count % 210 == 0:
                print(
                    f"{count} of {len(wanted)} searches, {time.monotonic() - started:.0f} s",
                    file=sys.stderr,
                )
    except KeyboardInterrupt:
        print(f"interrupted after {len(results)} of {len(wanted)} searches", file=sys.stderr)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    summaries = {
        objectives: summarise(results, objectives)
        for objectives in ("one", "two")
        if arguments.only in (None, objectives)
    }
    for objectives, summary in summaries.items():
        show(objectives, summary)
    paces = pace()
    for name, seconds in paces.items():
        print(f"{name}: {1000 * seconds:.0f} ms to find a configuration at 500 trials, predictions left out")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        head = {"launches": LAUNCHES, "seeds": arguments.seeds, "slow": SLOW, "seconds_at_500_trials": paces}
        arguments.json.write_text(json.dumps(head | summaries, indent=1))


if __name__ == "__main__":
    main()
