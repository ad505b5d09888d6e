"""A user's script over two ranks: all variants at once, then each by Lightning's own data parallelism.

python fused_ranks.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).parents[1]))
from pl_pipe.strategies import FusionDDPStrategy
from tests.fused_modules import Classifier, loader, trainer

VARIANTS: list[dict[str, Any]] = [{"lr": 0.1, "dropout": 0.3}, {"lr": 0.03, "smoothing": 0.1}]


def main(folder: Path) -> None:
    settings: dict[str, Any] = {"devices": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    L.seed_everything(1, verbose=False)
    fused = FusionDDPStrategy(VARIANTS, process_group_backend="gloo", formulation="array")
    running = trainer(strategy=fused, **settings)
    running.fit(Classifier(), loader(batch=5), loader(shuffle=False))
    kept = {"fused": [module.state_dict() for module in fused.variants], "alone": [], "metrics": []}
    kept["fused_metrics"] = dict(running.callback_metrics)
    for variant in VARIANTS:
        L.seed_everything(1, verbose=False)
        alone, plain = Classifier(**variant), trainer(strategy=DDPStrategy(process_group_backend="gloo"), **settings)
        plain.fit(alone, loader(batch=5), loader(shuffle=False))
        kept["alone"].append(alone.state_dict())
        kept["metrics"].append(dict(plain.callback_metrics))
    torch.save(kept, folder / f"rank{running.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
