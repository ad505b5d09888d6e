"""What the ranks of a job do with the language recipes: a short training of a small model, without dropout."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from pipedream_tasks import Rank, Watch, numbers
from torch.utils.data import Dataset, Subset

from pl_pipe.recipes.language.pretraining import BertPretraining
from pl_pipe.recipes.language.pretraining_data import SyntheticText, WikiData
from pl_pipe.recipes.language.question_answering import BertQuestionAnswering
from pl_pipe.recipes.language.squad_data import SquadData
from pl_pipe.recipes.language.text_data import LanguageModelText
from pl_pipe.recipes.language.transformer_lm import TransformerLM
from pl_pipe.recipes.loading import SplitData
from pl_pipe.tensors.trees import tensors_in

SAMPLES, BATCH_SIZE = 22, 4  # the last batch is smaller
SMALL = {"layers": 2, "hidden": 16, "heads": 2, "positions": 64, "dropout": 0.0, "lr": 3e-3, "warmup_steps": 2}


def made(recipe: str) -> tuple[L.LightningModule, SplitData]:
    if recipe == "bert":
        data: SplitData = SyntheticText(num_documents=10, num_val_documents=4, batch_size=BATCH_SIZE)
        return BertPretraining(size="tiny", **SMALL), data
    if recipe == "bert_squad":
        return BertQuestionAnswering(size="tiny", **SMALL), SquadData(
            window=64, stride=24, question=24, batch_size=BATCH_SIZE
        )
    text = LanguageModelText(unit="character", vocabulary_size=80, sequence_length=16, batch_size=BATCH_SIZE)
    return TransformerLM(80, tied=recipe == "tied_lm", **{**SMALL, "feed_forward": 24}), text


class First(SplitData):
    """Some samples of a data set, so that a training takes moments."""

    def __init__(self, whole: SplitData) -> None:
        super().__init__(batch_size=BATCH_SIZE, num_workers=0)
        self.whole = whole

    def prepare_data(self) -> None:
        self.whole.prepare_data()

    def setup(self, stage: str) -> None:
        self.whole.setup("fit")
        self.train_set, self.val_set = (
            Rows(data, count) for data, count in ((self.whole.train_set, SAMPLES), (self.whole.val_set, 7))
        )


class Rows(Subset[Any]):
    def __init__(self, data: Dataset[Any], count: int) -> None:
        super().__init__(data, range(min(count, len(data))))  # type: ignore[arg-type]

    def __getitems__(self, indices: list[int]) -> Any:
        return [self.dataset[index] for index in indices]


def fit(
    me: Rank, *, recipe: str, strategy: Mapping[str, Any] | str | None = None, seed: int = 0, epochs: int = 1
) -> dict[str, Any]:
    torch.manual_seed(1000 + seed)
    module, data = made(recipe)
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu", devices=me.ranks, strategy=me.strategy(strategy), max_epochs=epochs, callbacks=[watch],
        num_sanity_val_steps=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        logger=False, default_root_dir=me.folder, gradient_clip_val=1.0,
    )  # fmt: skip
    L.seed_everything(seed)
    trainer.fit(module, datamodule=First(data))
    me.notes.update(
        watch.notes,
        losses=watch.losses,
        batches=[batch for batch in watch.batches if not any(part.is_meta for part in tensors_in(batch))],
        validated=watch.validated,
        metrics=numbers(trainer.callback_metrics),
        weights={name: value.clone() for name, value in module.state_dict().items()},
    )
    return me.notes


def shares(me: Rank, *, root: str, workers: int, strategy: Mapping[str, Any] | str | None = None) -> dict[str, Any]:
    """The rows of shards that each rank is given in two epochs."""
    data = WikiData(root=root, vocabulary_size=10_000, batch_size=4, num_workers=workers)
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu", devices=me.ranks, strategy=me.strategy(strategy), max_epochs=2, callbacks=[watch],
        num_sanity_val_steps=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        logger=False, default_root_dir=me.folder, limit_val_batches=0,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(BertPretraining(size="tiny", vocabulary_size=10_000, **SMALL), datamodule=data)
    me.notes["rows"] = [batch["input_ids"][:, 0].tolist() for batch in watch.batches]
    return me.notes
