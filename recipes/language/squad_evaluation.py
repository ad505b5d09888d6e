"""Answers to all questions of the validation file, written and scored. model -> *evaluation* -> predictions.json."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device

from pl_pipe.errors import ConfigError

from ..progress import tracked
from .question_answering import BertQuestionAnswering
from .squad_answers import AnswerRule, Logits, choose_answer
from .squad_data import SquadData
from .squad_score import score_predictions
from .squad_windows import Window

SHOWN = ("exact", "f1", "HasAns_f1", "NoAns_f1")
"""Of the scores, those that fit into a table; the file has all."""


class SquadEvaluation:
    """Called once a checkpoint with the model that holds its weights; writes what the official script reads."""

    title = "SQuAD"
    main_metric = "f1"

    def __init__(self, candidates: int = 20, longest: int = 30, null_threshold: float = 0.0) -> None:
        self.rule = AnswerRule(candidates, longest, null_threshold)

    def __call__(self, model: L.LightningModule, datamodule: L.LightningDataModule, out: Path) -> dict[str, float]:
        """Exact match and F1 in per cent; `out` then has predictions.json, null_odds.json and scores.json."""
        if not isinstance(model, BertQuestionAnswering) or not isinstance(datamodule, SquadData):
            raise ConfigError(
                f"evaluation=squad is for recipe=bert_squad with data=squad, not for a {type(model).__name__} with a "
                f"{type(datamodule).__name__}"
            )
        datamodule.setup("validate")
        by_question: dict[int, list[tuple[Window, Logits, Logits]]] = {}
        for window, starts, ends in self._spans(model, datamodule):
            by_question.setdefault(window.question, []).append((window, starts, ends))
        answers = {
            question.id: choose_answer(
                question.context, by_question[place], self.rule, unanswerable=datamodule.version == "2.0"
            )
            for place, question in enumerate(datamodule.questions)
        }
        predictions = {name: answer.text for name, answer in answers.items()}
        result = score_predictions(datamodule.questions, predictions)
        out.mkdir(parents=True, exist_ok=True)
        _write(out / "predictions.json", predictions)
        _write(out / "null_odds.json", {name: answer.null_odds for name, answer in answers.items()})
        _write(out / "scores.json", result)
        return {name: result[name] for name in SHOWN if name in result}

    def _spans(self, model: L.LightningModule, data: SquadData) -> Any:
        """Each window with its logits, in the loader's order."""
        was_training = model.training
        model.eval()
        try:
            with torch.inference_mode():
                loader = data.val_dataloader()
                for batch in tracked(loader, "answering", count=len(loader)):
                    found = model.predict_step(move_data_to_device(batch, model.device), 0)
                    starts, ends = found["start"].float().cpu().numpy(), found["end"].float().cpu().numpy()
                    for place, number in enumerate(found["window"].tolist()):
                        yield data.windows[number], starts[place], ends[place]
        finally:
            model.train(was_training)


def _write(path: Path, content: Any) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)
