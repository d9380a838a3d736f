"""Finding the largest value of a parameter of a workload, within its budget and its data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.cli.predicting import Setup
from tuner.errors import UsageError

if TYPE_CHECKING:
    from tuner.memory.capacity import Capacity, Probe
    from tuner.memory.predictor import TrainingSet
    from tuner.records import Prediction
    from tuner.stand_in import Choices, Draw, Range

_OVER_VALUES = 10


@dataclass(frozen=True)
class Answer:
    """The largest value for one setting of the other parameters.

    Attributes:
        fixed: What was varied, by name, beside the parameter.
        capacity: What the search found, among the values that the training set makes use of.
        params: The whole configuration with the answer, or with the value that needs least.
        samples: The training set's length where it limits the answer, else None.
        notes: What a person should know, a sentence each.
        seconds: How long it took.
    """

    fixed: dict[str, Any]
    capacity: Capacity
    params: dict[str, Any]
    samples: int | None
    notes: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the documented fields."""
        shown, largest = self.capacity.shown, self.capacity.largest
        required = None if shown is None else shown.prediction.required
        device = None if shown is None else shown.prediction.device
        to_try = self.capacity.largest_to_try
        return {
            "largest": None if largest is None else largest.value,
            "largest_to_try": None if to_try is None else to_try.value,
            "required_bytes": None if required is None else required.to_json(),
            "device_bytes": None if device is None else device.to_json(),
            "certainty": self.capacity.certainty,
            "samples": self.samples,
            "notes": list(self.notes),
            "untraceable": [probe.value for probe in self.capacity.untraceable],
            "predicted": [_probe_fields(probe) for probe in self.capacity.probes],
            "values": self.capacity.values,
            "params": self.params,
            "seconds": self.seconds,
        }


class Finder:
    """Finds the largest value of a parameter, given others.

    Raises:
        UsageError: There is no such parameter, its values have no order, or no budget is known.
    """

    def __init__(
        self,
        setup: Setup,
        param: str,
        values: dict[str, str],
        maximum: int | None,
        show: Callable[[str], None],
    ) -> None:
        if setup.budget_bytes is None:
            raise UsageError("there is no budget to fit into", hint="give one, such as --budget 6GiB")
        self._setup, self._param, self._values = setup, param, values
        self._maximum, self._show = maximum, show
        self._values_of({})  # a parameter without an order is found before anything is traced

    def values_over(self, name: str) -> list[Any]:
        """Return the values of another parameter to repeat for."""
        from tuner.memory.parameter_values import spread

        return spread(self._asked(self._draw({}), name), _OVER_VALUES)

    def find(self, fixed: dict[str, Any]) -> Answer:
        """Return the answer with some parameters fixed."""
        from tuner.memory.capacity import useful_batch_sizes

        started = time.perf_counter()
        values, samples = self._values_of(fixed), None
        notes: list[str] = []
        capacity = self._search(values, fixed)
        data = self._limit_of_data(capacity, values, fixed)
        if data is not None:
            samples = data.samples
            useful = useful_batch_sizes(values, samples, drop_last=data.drop_last)
            capacity = self._search(useful or values, fixed)  # nearly all from the cache
            what = "leaves no batch to train on" if data.drop_last else "changes nothing"
            notes = [f"the training set has {samples:,} samples; a larger batch {what}"]
        value = values[0] if capacity.shown is None else capacity.shown.value
        return Answer(
            fixed=fixed,
            capacity=capacity,
            params=self._draw({**fixed, self._param: value}).params,
            samples=samples,
            notes=(*notes, *_notes(capacity, self._param)),
            seconds=time.perf_counter() - started,
        )

    def _search(self, values: Sequence[Any], fixed: dict[str, Any]) -> Capacity:
        from tuner.memory.capacity import largest_that_fits

        return largest_that_fits(values, lambda value: self._predict({**fixed, self._param: value}))

    def _draw(self, fixed: dict[str, Any]) -> Draw:
        from tuner.stand_in import draw

        return draw(self._setup.loaded.workload, self._values, fixed)

    def _asked(self, drawn: Draw, name: str) -> Range | Choices:
        if name not in drawn.space:
            raise UsageError(
                f"{type(self._setup.loaded.workload).__name__} has no parameter '{name}'",
                hint=f"its parameters: {', '.join(drawn.space)}",
            )
        return drawn.space[name]

    def _values_of(self, fixed: dict[str, Any]) -> Sequence[Any]:
        from tuner.memory.parameter_values import whole_or_chosen

        return whole_or_chosen(self._param, self._asked(self._draw(fixed), self._param), self._maximum)

    def _predict(self, fixed: dict[str, Any]) -> Prediction:
        self._show(" ".join(f"{name}={value}" for name, value in fixed.items()))
        return self._setup(self._draw(fixed).params)

    def _limit_of_data(
        self, capacity: Capacity, values: Sequence[Any], fixed: dict[str, Any]
    ) -> TrainingSet | None:
        """Return the training set if the parameter is its loader's batch size and exceeds it."""
        top = capacity.largest_to_try or capacity.largest
        if top is None:
            return None
        ends = (values[0], top.value)
        found = [
            self._setup.predictor.training_set(self._draw({**fixed, self._param: value}).params)
            for value in ends
        ]
        follows = all(
            data is not None and data.batch_size == end for data, end in zip(found, ends, strict=True)
        )
        data = found[-1]
        return data if follows and data is not None and top.value > data.samples else None


def _notes(capacity: Capacity, param: str) -> list[str]:
    """Return how sure the answer is, and what could not be predicted."""
    predicted = f"{len(capacity.probes)} of {capacity.values} values were predicted"
    notes = []
    if capacity.dip:
        notes.append(
            f"a larger {param} needs up to {capacity.dip:.1%} less than a smaller one: "
            + (
                "every value above the answer was predicted"
                if capacity.certainty == "all"
                else f"{predicted}, larger ones may fit"
            )
        )
    if capacity.untraceable:
        named = ", ".join(str(probe.value) for probe in capacity.untraceable[:5])
        more = ", …" if len(capacity.untraceable) > 5 else ""
        reason = capacity.untraceable[0].prediction.assumptions[0]
        notes.append(f"{param} {named}{more} counts as not fitting: {reason}")
    return notes


def _probe_fields(probe: Probe) -> dict[str, Any]:
    prediction = probe.prediction
    return {
        "value": probe.value,
        "required_bytes": None if prediction.required is None else prediction.required.expected,
        "device_bytes": None if prediction.device is None else prediction.device.expected,
        "fits_probability": prediction.fits_probability,
        "verdict": prediction.verdict,
    }
