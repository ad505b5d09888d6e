"""Samples that are dictionaries of tensors."""

from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

Sample = dict[str, Tensor]


class Samples(Dataset[Sample]):
    """Rows of tensors that lie in memory."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @override
    def __getitem__(self, index: int) -> Sample:
        return {name: values[index] for name, values in self.columns.items()}
