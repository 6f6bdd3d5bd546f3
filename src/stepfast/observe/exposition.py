"""Prometheus' text format: families of samples, histograms, one page.

Owns: the format (version 0.0.4) and how it is escaped. Does not own: any metric.

Written here because it is a page of code: the client library brings a registry for the whole
process, and what is exported are folds of events and levels of a machine, which have their owners.
The tests read every page with that library's parser.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: the family's name with `suffix`, labels and a value."""

    value: float
    labels: Labels = ()
    suffix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric. One without samples is listed all the same, so that it can be found."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()  # the names that its samples have, without `le`
    samples: tuple[Sample, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names by which a query finds it."""
        ends = ("_bucket", "_sum", "_count") if self.kind == HISTOGRAM else ("",)
        return tuple(f"{self.name}{end}" for end in ends)


class Histogram:
    """Counts of observations at or below each bound, by labels."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend; what is above the last one counts as below infinity."""
        self._bounds = (*bounds, inf)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, value: float, labels: Labels = (), times: int = 1) -> None:
        """Count a value, `times` times."""
        counts = self._counts.setdefault(labels, [0] * len(self._bounds))
        counts[bisect_left(self._bounds, value)] += times
        self._sums[labels] = self._sums.get(labels, 0.0) + value * times

    def samples(self) -> Iterator[Sample]:
        """Buckets, sum and count of all labels."""
        for labels, counts in sorted(self._counts.items()):
            total = 0
            for bound, count in zip(self._bounds, counts, strict=True):
                total += count
                yield Sample(total, (*labels, ("le", number(bound))), "_bucket")
            yield Sample(self._sums[labels], labels, "_sum")
            yield Sample(total, labels, "_count")


def by_label(name: str, values: Mapping[str, float]) -> tuple[Sample, ...]:
    """A sample for each value of one label."""
    return tuple(Sample(value, ((name, key),)) for key, value in sorted(values.items()))


def page(families: Iterable[Family]) -> str:
    """What Prometheus reads."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.text)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines += [_line(family.name, sample) for sample in family.samples]
    return "\n".join([*lines, ""])


def number(value: float) -> str:
    """As Prometheus writes numbers."""
    if isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _line(name: str, sample: Sample) -> str:
    labels = ",".join(f'{key}="{_quoted(value)}"' for key, value in sample.labels)
    braced = f"{{{labels}}}" if labels else ""
    return f"{name}{sample.suffix}{braced} {number(sample.value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
