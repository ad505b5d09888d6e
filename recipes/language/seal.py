"""The vocabulary that a checkpoint was trained with, as two numbers among its weights."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from pl_pipe.errors import CheckpointError

from .vocabulary import Vocabulary, read_vocabulary


class VocabularySeal(nn.Module):
    """Refuses weights of another vocabulary: ids would mean other words, and no shape need tell."""

    numbers: Tensor

    def __init__(self, vocabulary: Vocabulary | None, size: int) -> None:
        """Without a vocabulary, as where shards hold ids already, its size is all that is known."""
        super().__init__()
        digest = 0 if vocabulary is None else vocabulary.digest
        self.register_buffer("numbers", torch.tensor([size, digest], device="cpu"))

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        found = state_dict.get(f"{prefix}numbers")
        if isinstance(found, Tensor) and not found.is_meta and not self.numbers.is_meta:
            (size, digest), (own_size, own_digest) = found.tolist(), self.numbers.tolist()
            if size != own_size or (digest and own_digest and digest != own_digest):
                raise CheckpointError(
                    f"the checkpoint was trained with another vocabulary ({size} tokens, digest {digest:08x}) than "
                    f"this run's ({own_size} tokens, digest {own_digest:08x}); set data.vocabulary to the vocab.txt "
                    "that it was trained with (and data.lowercase as it was)"
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def sealed_vocabulary(path: str | None, size: int | None, *, lowercase: bool = True) -> tuple[int, VocabularySeal]:
    """How many words a model needs, and its seal; `size` is for data whose vocabulary is not at hand."""
    if path is None and size is not None:
        return size, VocabularySeal(None, size)
    vocabulary = read_vocabulary(path, lowercase=lowercase)
    return len(vocabulary), VocabularySeal(vocabulary, len(vocabulary))
