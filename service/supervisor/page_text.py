"""Text of the metrics page, made from the metrics files of all processes.

An endpoint picker may scrape twenty times a second, and prometheus_client parses every key of every file for each page.
Here each key is parsed once. A page reads the files, compares them with what was read before, and formats the groups
that have changed: a group is the samples of one metric with the same labels. A page shows the values at its scrape.

metrics_file.py has the format of the files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client.utils import floatToGoString

from npuserve.service.metrics_file import HEADER_BYTES, LENGTH, entries

Labels = tuple[tuple[str, str], ...]
Slot = float | None
"""Place of a sample in its group: the upper bound of a histogram's bucket; None for the sum of a histogram, and for the
value of another metric."""


class Group:
    """Samples of one metric with the same labels.

    labels: sorted, without `le`.
    values: sum, maximum or minimum over the files, by slot.
    kept: sums over the files of `PageText.keep`, by slot.
    text: lines of the page.
    """

    def __init__(self, family: Family, labels: Labels):
        self.labels = labels
        self.values: dict[Slot, float] = {}
        self.kept: dict[Slot, float] = {}
        self.text = ""
        self.parts: list[_Part] = []
        self.family = family
        self._lines = _Lines(family.kind, family.name, labels, ())

    @property
    def is_empty(self) -> bool:
        return not self.parts and not self.kept

    def update(self) -> None:
        """Read the values of all files, and format them."""
        combine = self.family.combine
        values = dict(self.kept)
        for part in self.parts:
            if not values:
                values = dict(zip(part.slots, part.values(), strict=True))
                continue
            for slot, value in zip(part.slots, part.values(), strict=True):
                values[slot] = combine(values[slot], value) if slot in values else value
        if values.keys() != self.values.keys():
            self._lines = _Lines(self.family.kind, self.family.name, self.labels, values)
        self.values = values
        self.text = self._lines.format(values)


class Family:
    """A metric with its groups, by labels. name: without _total. text: its part of the page."""

    def __init__(self, name: str, kind: str, documentation: str):
        self.name = name
        self.kind = kind
        self.documentation = documentation
        self.groups: dict[Labels, Group] = {}
        self.combine: Callable[[float, float], float] = float.__add__
        self.header = header(name, kind, documentation)
        self.text = self.header

    def update(self) -> None:
        self.text = self.header + "".join(group.text for group in self.groups.values())


class _Part:
    """Consecutive entries of one group in a file. start, end: bytes of the file from the first to the last value."""

    def __init__(self, file: _File, group: Group, slots: list[Slot], offsets: list[int]):
        self.slots = slots
        self.start = offsets[0]
        self.end = offsets[-1] + 8
        self.group = group
        self._file = file
        # The values are doubles with other bytes between them.
        gaps = [after - before - 8 for before, after in itertools.pairwise(offsets)]
        self._values = struct.Struct("=d" + "".join(f"{gap}xd" for gap in gaps))

    def values(self) -> tuple[float, ...]:
        return self._values.unpack_from(self._file.data, self.start)


class _File:
    """A metrics file. data: used bytes as of the last `refresh`."""

    def __init__(self, path: Path, inode: int):
        self.inode = inode
        self.data = b""
        self.parts: list[_Part] = []
        self.kind, *rest = path.stem.split("_")
        self.mode = rest[0] if self.kind == "gauge" else ""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._descriptor)

    def refresh(self, group_of: Callable[[_File, list[object]], tuple[Group, Slot]]) -> set[Group]:
        """Read the file again, and return the groups whose values may have changed.

        group_of: returns group and slot of a key.

        Raises OSError, and other exceptions if the file is broken.
        """
        first = os.pread(self._descriptor, LENGTH.size, 0)
        before = self.data
        used = LENGTH.unpack(first)[0] if first else 0  # empty until its process has set its size
        if not len(before) <= used <= os.fstat(self._descriptor).st_size:
            raise ValueError(f"it uses {used} bytes, after {len(before)}, which is not possible")
        data = os.pread(self._descriptor, used, 0)
        if data == before:
            return set()
        added = list(self._parse(data, max(len(before), HEADER_BYTES), group_of))
        self.data = data
        changed = {part.group for part in self.parts if data[part.start : part.end] != before[part.start : part.end]}
        for part in added:
            part.group.parts.append(part)
            changed.add(part.group)
        self.parts += added
        return changed

    def _parse(
        self, data: bytes, position: int, group_of: Callable[[_File, list[object]], tuple[Group, Slot]]
    ) -> Iterator[_Part]:
        """Yield the parts behind a position."""
        last: Group | None = None
        slots: list[Slot] = []
        offsets: list[int] = []
        for key, offset in entries(data, position, len(data)):
            group, slot = group_of(self, json.loads(key))
            if group is not last and last is not None:
                yield _Part(self, last, slots, offsets)
                slots = []
                offsets = []
            last = group
            slots.append(slot)
            offsets.append(offset)
        if last is not None:
            yield _Part(self, last, slots, offsets)


class PageText:
    """Text of all metrics in the files of `folder`. Not thread-safe.

    declared: (name, kind, help) of each metric, in the order of the page. A metric without samples is named only.
    on_broken: called with the name of a file that cannot be read, and the error. Its samples are left out.
    """

    def __init__(
        self, folder: Path, declared: Sequence[tuple[str, str, str]], on_broken: Callable[[str, Exception], None]
    ):
        self._folder = folder
        self._on_broken = on_broken
        self._files: dict[str, _File] = {}
        self._changed: set[Group] = set()  # groups to format; kept if a refresh ends with an error
        self.families = {name: Family(name, kind, text) for name, kind, text in declared}

    def refresh(self) -> set[str]:
        """Read what has changed. Return the names of the metrics whose text has changed. Raises OSError."""
        with os.scandir(self._folder) as entries:
            inodes = {entry.name: entry.inode() for entry in entries if entry.name.endswith(".db")}
        for name in [name for name, file in self._files.items() if inodes.get(name) != file.inode]:
            self._changed |= self._drop(name)
        for name, inode in sorted(inodes.items()):
            file = self._files.get(name)
            if file is None:
                with contextlib.suppress(FileNotFoundError):
                    file = self._files[name] = _File(self._folder / name, inode)
            if file is None:
                continue
            try:
                self._changed |= file.refresh(self._group_of)
            except OSError:
                raise
            except Exception as error:  # of a broken file, whatever it is
                self._changed |= self._drop(name)
                self._remove_empty_groups()
                self._on_broken(name, error)
        return self._update()

    def values(self, name: str) -> Iterator[float]:
        """Yield the values of all samples of a counter or gauge."""
        for group in self.families[name].groups.values():
            yield from group.values.values()

    def keep(self, name: str) -> None:
        """Add the values of a file, as of the last `refresh`, to sums in memory, and forget the file.

        Nothing if the file was broken. Only for counters and histograms. Files hold histogram buckets individually, not
        cumulated, so that sums are exact.
        """
        if name not in self._files:
            return
        for part in self._files[name].parts:
            kept = part.group.kept
            for slot, value in zip(part.slots, part.values(), strict=True):
                kept[slot] = kept.get(slot, 0.0) + value
        self._drop(name)

    def close(self) -> None:
        for name in list(self._files):
            self._drop(name)

    def _drop(self, name: str) -> set[Group]:
        """Forget a file; return the groups that it was part of."""
        file = self._files.pop(name)
        file.close()
        changed = {part.group for part in file.parts}
        for group in changed:
            group.parts = [part for part in group.parts if part not in file.parts]
        return changed

    def _remove_empty_groups(self) -> None:
        """Remove the groups of a file that was found to be broken after their keys were read."""
        for family in self.families.values():
            family.groups = {labels: group for labels, group in family.groups.items() if not group.is_empty}

    def _update(self) -> set[str]:
        families: dict[str, Family] = {}
        for group in self._changed:
            family = group.family
            if not group.is_empty:
                group.update()
            elif family.groups.get(group.labels) is group:  # a group of a new file may have replaced it
                del family.groups[group.labels]
            families[family.name] = family
        self._changed.clear()
        for family in families.values():
            family.update()
        return set(families)

    def _group_of(self, file: _File, key: list[object]) -> tuple[Group, Slot]:
        """Return the group and slot of an entry's key. Raises an exception if it is none."""
        name, _, labels, documentation = key
        if not isinstance(name, str) or not isinstance(labels, dict) or not isinstance(documentation, str):
            raise ValueError(f"not a key: {key}")
        family = self.families.get(name)
        if family is None:
            family = self.families[name] = Family(name, file.kind, documentation)
        if family.kind != file.kind:
            raise ValueError(f"{name} is a {family.kind}, not a {file.kind}")
        family.combine = {"livemax": max, "livemin": min}.get(file.mode, float.__add__)
        bound = labels.pop("le", None)
        group_labels = tuple(sorted(labels.items()))
        group = family.groups.get(group_labels)
        if group is None:
            group = family.groups[group_labels] = Group(family, group_labels)
        return group, None if bound is None else float(bound)


class _Lines:
    """Formatter of the samples of one group, whose names and labels are formatted once."""

    def __init__(self, kind: str, name: str, labels: Labels, slots: Mapping[Slot, float] | Sequence[Slot]):
        self._bounds = sorted(slot for slot in slots if slot is not None)
        self._is_histogram = kind == "histogram"
        plain = _labels_text(labels)
        self._value = f"{name}_total{plain} " if kind == "counter" else f"{name}{plain} "
        self._sum = f"{name}_sum{plain} "
        self._count = f"{name}_count{plain} "
        self._buckets = [
            f"{name}_bucket{_labels_text(tuple(sorted((*labels, ('le', floatToGoString(bound))))))} "
            for bound in self._bounds]

    def format(self, values: Mapping[Slot, float]) -> str:
        if not self._is_histogram:
            return f"{self._value}{_number(values[None])}\n" if None in values else ""
        total = 0.0
        lines = []
        for start, bound in zip(self._buckets, self._bounds, strict=True):
            total += values[bound]
            lines.append(f"{start}{_number(total)}\n")
        lines.append(f"{self._count}{_number(total)}\n")
        lines.append(f"{self._sum}{_number(values.get(None, 0.0))}\n")
        return "".join(lines)


def _number(value: float) -> str:
    """Return a value as Go formats it. Below a million that is Python's way."""
    return repr(value) if 0.0 <= value < 1e6 else floatToGoString(value)


def header(name: str, kind: str, documentation: str) -> str:
    """Return the lines before the samples of a metric. name: without _total."""
    shown = f"{name}_total" if kind == "counter" else name
    text = documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {shown} {text}\n# TYPE {shown} {kind}\n"


def samples(kind: str, name: str, labels: Labels, values: Mapping[Slot, float]) -> str:
    """Return the lines of the samples of one metric with the same labels. labels: sorted."""
    return _Lines(kind, name, labels, values).format(values)


def _labels_text(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = ((name, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")) for name, value in labels)
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
