"""Matrix of a model as it is stored, and what each form of it declares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from npuserve.kernels.weight import WeightForm
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.forms.targets import Put, Shapes, Targets, put_after, target_of_rows
from npuserve.npu.model.layers.shard import Rows, Span
from npuserve.npu.quantization.w8a8 import W8A8


@dataclass(frozen=True, slots=True)
class AllocatedWeight:
    """Uninitialized weight, and the targets that fill it.

    merge: called when all targets are filled, to set numbers of the matrix from those of its parts. Returns True if the
        parts differed. None if there are no such numbers.
    """

    weight: WeightForm
    targets: Targets
    merge: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True)
class FormChange:
    """Difference between the form of a matrix in the checkpoint and in memory, for the log.

    text: the change and its reason, after "linear layers".
    bits: of a number in the checkpoint; stored_bits: in memory.
    advice: to have less memory; "" for none.
    """

    text: str
    bits: int
    stored_bits: int
    advice: str = ""


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


class StoredForm(ABC):
    """Form of a stored matrix."""

    __slots__ = ()

    @abstractmethod
    def nbytes(self, rows: int, inputs: int, dtype: torch.dtype, backend: Backend) -> int:
        """Return the bytes of a matrix [rows, inputs] without its bias. dtype: of the activations."""

    @abstractmethod
    def allocate(self, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> AllocatedWeight:
        """Allocate the weight of a matrix."""

    def check(self, name: str, columns: Span) -> None:
        """Raise ModelError for columns that the form cannot store on a rank. name: of a part of the matrix."""
        return

    def change(self, part: str, matrix: StoredMatrix, dtype: torch.dtype, backend: Backend) -> FormChange | None:
        """Return how a part of the matrix changes its form while loading so that it takes more memory; None if not."""
        return None

    def stacked_with(self, other: StoredForm) -> StoredForm | None:
        """Return the form of a matrix of this form with the rows of one of the form `other` below.

        None if there is no such form, or if its products could differ from those of the two matrices.
        """
        return None

    @property
    def is_float(self) -> bool:
        """True if the numbers have the dtype of the activations. In bfloat16 they may be compact."""
        return False

    @property
    def golden_copies(self) -> int:
        """Number of copies of the weight in float64 that the golden product makes."""
        return 0

    @property
    def converted(self) -> Mapping[str, W8A8]:
        """Scheme of each part that the checkpoint has in float8, and that becomes floats while loading."""
        return {}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Linear weight or embedding table as it is stored.

    parts: tensors of the checkpoint, name -> rows of this shard, stacked in this order and followed by `padding` rows.
    columns: columns of this shard.
    biased: the checkpoint has biases. They are added on each rank, or on rank 0 if the ranks divide the columns.
    stacked: see `layers.layer.Matrix`.
    """

    parts: Mapping[str, Span | Rows]
    columns: Span
    form: StoredForm
    padding: int = 0
    biased: bool = False
    stacked: int = 0

    @property
    def rows(self) -> int:
        return sum(span.size for span in self.parts.values()) + self.padding

    @property
    def inputs(self) -> int:
        """Return K."""
        return self.columns.size

    @property
    def adds_bias(self) -> bool:
        """Return True if this shard has the biases."""
        return self.biased and self.columns.first == 0

    def stacked_with(self, other: StoredMatrix) -> StoredMatrix | None:
        """Return this matrix with the rows of another one below; None if they cannot be stored as one."""
        form = self.form.stacked_with(other.form)
        if form is None or self.biased or other.biased or self.columns != other.columns:
            return None
        parts = dict(self.parts)
        for name, rows in other.parts.items():
            if (above := parts.get(name)) is None:
                parts[name] = rows
            elif name == next(reversed(parts)):
                parts[name] = Rows(above.ranges + rows.ranges, rows.whole)
            else:
                return None
        return replace(self, parts=parts, form=form)

    def nbytes(self, dtype: torch.dtype, backend: Backend) -> int:
        """Return the bytes of the matrix and its bias of `dtype`."""
        bias = self.rows * dtype.itemsize if self.adds_bias else 0
        return bias + self.form.nbytes(self.rows, self.inputs, dtype, backend)

    def tensor_name(self, part: str) -> str:
        """Return the name of the checkpoint's tensor with the numbers of a part."""
        return part if self.stacked else f"{part}.weight"

    def number_targets(self, write: Put, itemsize: int, dtypes: tuple[str, ...]) -> Targets:
        """Return the targets of the parts' numbers, stored in the checkpoint as [rows, columns].

        write: writes rows of the whole matrix.
        itemsize: bytes of a stored number.
        dtypes: accepted dtypes.
        """
        targets: Targets = {}
        first = 0
        columns = self.columns
        for name, rows in self.parts.items():
            shapes: Shapes = ((rows.whole, columns.whole),)
            if self.stacked:
                shapes += ((self.stacked, rows.whole // self.stacked, columns.whole),)
            targets[self.tensor_name(name)] = target_of_rows(
                partial(put_after, write, first), rows, shapes, rows.size * columns.size * itemsize, dtypes,
                columns=columns)
            first += rows.size
        return targets
