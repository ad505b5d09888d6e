"""Makes the recipes' typed configurations known to Hydra, under the hidden group `schema`.

Kept apart from the models so that listing or composing a recipe imports neither torch nor Lightning.
"""

from hydra.core.config_store import ConfigStore

from .language import config as language
from .recorded import config as recorded
from .vision import config as vision


def register_configs() -> None:
    """Stores every schema; calling it again changes nothing."""
    store = ConfigStore.instance()
    store.store(group="schema/recipe", name="image_classifier", node=vision.ImageClassifierConfig, package="recipe")
    for name, recipe in {
        "bert_pretraining": language.BertPretrainingConfig,
        "bert_question_answering": language.BertQuestionAnsweringConfig,
        "transformer_lm": language.TransformerLMConfig,
    }.items():
        store.store(group="schema/recipe", name=name, node=recipe, package="recipe")
    store.store(group="schema/evaluation", name="squad", node=language.SquadEvaluationConfig, package="evaluation")
    store.store(group="schema/recipe", name="recorded_model", node=recorded.RecordedModelConfig, package="recipe")
    store.store(group="schema/data", name="recorded", node=recorded.RecordedDataConfig, package="data")
    for name, node in {
        "digits": vision.DigitsConfig,
        "synthetic_images": vision.SyntheticImagesConfig,
        "imagenet": vision.ImageNetConfig,
        "cifar10": vision.Cifar10Config,
        "wiki": language.WikiConfig,
        "synthetic_text": language.SyntheticTextConfig,
        "squad": language.SquadConfig,
        "text": language.TextConfig,
    }.items():
        store.store(group="schema/data", name=name, node=node, package="data")
