"""Makes the recipes' typed configurations known to Hydra, under the hidden group `schema`.

Kept apart from the models so that listing or composing a recipe imports neither torch nor Lightning.
"""

from hydra.core.config_store import ConfigStore

from .recorded import config as recorded
from .translation import config as translation
from .vision import config as vision


def register_configs() -> None:
    """Stores every schema; calling it again changes nothing."""
    store = ConfigStore.instance()
    store.store(group="schema/recipe", name="image_classifier", node=vision.ImageClassifierConfig, package="recipe")
    store.store(group="schema/recipe", name="recorded_model", node=recorded.RecordedModelConfig, package="recipe")
    store.store(group="schema/data", name="recorded", node=recorded.RecordedDataConfig, package="data")
    store.store(group="schema/recipe", name="translator", node=translation.TranslatorConfig, package="recipe")
    store.store(group="schema/evaluation", name="bleu", node=translation.BleuConfig, package="evaluation")
    for name, node in {
        "numbers": translation.NumbersConfig,
        "parallel_text": translation.ParallelTextConfig,
        "digits": vision.DigitsConfig,
        "synthetic_images": vision.SyntheticImagesConfig,
        "imagenet": vision.ImageNetConfig,
        "cifar10": vision.Cifar10Config,
    }.items():
        store.store(group="schema/data", name=name, node=node, package="data")
