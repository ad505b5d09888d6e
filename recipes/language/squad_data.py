"""SQuAD 2.0 from the official files, or the embedded sample of thirty questions."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from pl_pipe.errors import DataError
from pl_pipe.log import get_logger

from ..loading import SplitData
from .samples import Sample
from .squad_format import SAMPLE, Question, read_questions
from .squad_windows import Window, WindowRule, make_windows
from .vocabulary import PAD, read_vocabulary

log = get_logger(__name__)
TRAIN_FILE, VAL_FILE = "train-v2.0.json", "dev-v2.0.json"


class SquadData(SplitData):
    """Windows of questions and paragraphs; without a root, the sample both trains and validates."""

    questions: tuple[Question, ...]
    """Of the validation file, in its order; `windows` refer to them."""
    windows: list[Window]

    def __init__(
        self,
        *,
        root: str | None = None,
        train_file: str | None = None,
        val_file: str | None = None,
        version: str = "2.0",
        skip_misplaced: bool = False,
        vocabulary: str | None = None,
        lowercase: bool = True,
        window: int = 384,
        stride: int = 128,
        question: int = 64,
        batch_size: int = 8,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        self.rule = WindowRule(window, stride, question)
        self.train_file, self.val_file = _files(root, train_file, val_file, version)
        if self.train_file not in (None, SAMPLE) and vocabulary is None:
            raise DataError(
                "data.vocabulary is null, and the embedded vocabulary knows the sample's words only; set "
                "data.vocabulary to the vocab.txt of the weights you start from"
            )
        self.vocabulary = read_vocabulary(vocabulary, lowercase=lowercase)
        self.version, self.skip_misplaced = version, skip_misplaced

    @override
    def setup(self, stage: str) -> None:
        if not hasattr(self, "questions"):
            self.questions, self.windows, held = self._read(self.val_file, training=False)
            self.val_set = self.test_set = held
        if stage == "fit" and not hasattr(self, "train_set"):
            if self.train_file is None:
                raise DataError(
                    f"data.train_file is null and so is data.root; to train, set data.train_file to a file as "
                    f"{TRAIN_FILE.replace('2.0', self.version)}"
                )
            same = self.train_file == self.val_file and not self.skip_misplaced
            self.train_set = self.val_set if same else self._read(self.train_file, training=True)[2]

    def _read(self, path: Path, *, training: bool) -> tuple[tuple[Question, ...], list[Window], Dataset[Sample]]:
        """What is not where the file says is answered and scored, but not trained on."""
        found = read_questions(path, version=self.version, skip_misplaced=self.skip_misplaced)
        questions = found.all if training else found.all + found.misplaced
        if found.misplaced and training:
            log.warning(
                "%s: %d questions left out of training, whose answers are not where the file says (%s, …)",
                path.name, len(found.misplaced), found.misplaced[0].id,
            )  # fmt: skip
        windows, tally = make_windows(questions, self.vocabulary, self.rule)
        log.info("%s: %s", path.name, tally.describe())
        return questions, windows, WindowSamples(windows, length=self.rule.window, fill=self.vocabulary.ids[PAD])


class WindowSamples(Dataset[Sample]):
    """Windows filled up to one length, as they are asked for."""

    def __init__(self, windows: list[Window], *, length: int, fill: int) -> None:
        self.windows, self.length, self.fill = windows, length, fill

    def __len__(self) -> int:
        return len(self.windows)

    @override
    def __getitem__(self, index: int) -> Sample:
        window = self.windows[index]
        tokens = len(window.ids)
        ids = torch.full((self.length,), self.fill)
        ids[:tokens] = torch.from_numpy(window.ids)
        mask, segments = torch.zeros(self.length, dtype=torch.long), torch.zeros(self.length, dtype=torch.long)
        mask[:tokens] = 1
        segments[window.context_from : tokens] = 1
        numbers = {"start": window.start, "end": window.end, "window": index}
        tensors: dict[str, Tensor] = {"input_ids": ids, "input_mask": mask, "segment_ids": segments}
        return tensors | {name: torch.tensor(number) for name, number in numbers.items()}


def _files(root: str | None, train_file: str | None, val_file: str | None, version: str) -> tuple[Path | None, Path]:
    """The two files; the official names are looked for under `root`. A `val_file` alone is for evaluation."""
    if root is None and train_file is None and val_file is None:
        return SAMPLE, SAMPLE
    folder = None if root is None else Path(root).expanduser()
    if folder is not None and not folder.is_dir():
        raise DataError(f"data.root={root} is no folder; set it to the folder that holds {TRAIN_FILE} and {VAL_FILE}")
    found: list[Path | None] = []
    for name, given, official in (("train_file", train_file, TRAIN_FILE), ("val_file", val_file, VAL_FILE)):
        official = official.replace("2.0", version)
        if given is None and folder is None and name == "train_file":
            found.append(None)
            continue
        if given is None and folder is None:
            raise DataError(f"data.{name} is null and so is data.root; set it to a file as {official}")
        path = Path(given).expanduser() if given is not None else Path(str(folder)) / official
        if not path.is_file():
            raise DataError(f"{path} does not exist; put {official} there, or set data.{name}")
        found.append(path)
    assert found[1] is not None
    return found[0], found[1]
