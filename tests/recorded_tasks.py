"""What the ranks of a job do with a recorded model: train it, and note who slept and what was sent."""

import json
from collections.abc import Mapping
from typing import Any

import lightning as L
from pipedream_tasks import Rank

from pl_pipe.cluster import Cluster
from pl_pipe.comm import DistributedTransport
from pl_pipe.recipes.recorded.datamodule import RecordedData
from pl_pipe.recipes.recorded.layers import RecordedLayer
from pl_pipe.recipes.recorded.module import RecordedModel
from pl_pipe.strategies.pipeline import plan_choice

BATCH_SIZE = 8


class Notes(L.Callback):
    """What is known while the strategy still stands."""

    def __init__(self, me: Rank) -> None:
        self.me = me

    def on_train_end(self, trainer: Any, module: Any) -> None:
        divided = getattr(trainer.strategy, "divided", None)
        self.me.notes.update(steps=trainer.global_step, plan=None if divided is None else divided.plan)


def fit(
    me: Rank,
    *,
    graph: str,
    strategy: Mapping[str, Any] | str | None = None,
    dilation: float = 1.0,
    bandwidth: float | None = None,
    batches: int = 6,
) -> dict[str, Any]:
    """A training whose notes say which layers slept here, and how large messages were."""
    me.notes.update(slept=[], sent=[], measured=0)
    rest, send = RecordedLayer.rest, DistributedTransport.send

    def noted_rest(layer: RecordedLayer, start_s: float, wanted_s: float) -> None:
        me.notes["slept"].append((layer.node_name, wanted_s))
        rest(layer, start_s, wanted_s)

    def noted_send(transport: Any, message: Any, tensor: Any) -> None:
        if tensor.is_floating_point():
            me.notes["sent"].append((message.source, message.target, tensor.nbytes))
        send(transport, message, tensor)

    def measured(*_: Any, **__: Any) -> Any:
        me.notes["measured"] += 1
        raise AssertionError("a recorded model is not to be measured")

    RecordedLayer.rest, DistributedTransport.send, plan_choice.profile = noted_rest, noted_send, measured  # type: ignore[assignment,method-assign]
    path = me.folder / f"graph{me.rank}.txt"
    path.write_text(graph)
    if bandwidth is not None and me.rank == 0:
        (me.folder / "cluster.json").write_text(json.dumps(Cluster.flat(me.ranks, bandwidth).as_json()))
    module = RecordedModel(str(path), dilation, BATCH_SIZE)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=me.ranks,
        strategy=me.strategy(strategy),
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[Notes(me)],
        default_root_dir=me.folder,
    )
    trainer.fit(module, datamodule=RecordedData(batch_size=BATCH_SIZE, batches=batches))
    return me.notes
