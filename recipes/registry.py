"""Makes the recipes' typed configurations known to Hydra, under the hidden group `schema`.

Kept apart from the models so that listing or composing a recipe imports neither torch nor Lightning.
"""

from hydra.core.config_store import ConfigStore

from .generative import config as generative
from .language import config as language
from .points import config as points
from .preparation import config as preparation
from .recorded import config as recorded
from .translation import config as translation
from .vision import config as vision


def register_configs() -> None:
    """Stores every schema; calling it again changes nothing."""
    store = ConfigStore.instance()
    for name, node in {
        "image_classifier": vision.ImageClassifierConfig,
        "recorded_model": recorded.RecordedModelConfig,
        "point_classifier": points.PointClassifierConfig,
        "real_fake": generative.RealFakeConfig,
        "dcgan": generative.DcganConfig,
        "bert_pretraining": language.BertPretrainingConfig,
        "bert_question_answering": language.BertQuestionAnsweringConfig,
        "transformer_lm": language.TransformerLMConfig,
        "translator": translation.TranslatorConfig,
    }.items():
        store.store(group="schema/recipe", name=name, node=node, package="recipe")
    for name, node in {
        "recorded": recorded.RecordedDataConfig,
        "digits": vision.DigitsConfig,
        "synthetic_images": vision.SyntheticImagesConfig,
        "imagenet": vision.ImageNetConfig,
        "cifar10": vision.Cifar10Config,
        "wiki": language.WikiConfig,
        "synthetic_text": language.SyntheticTextConfig,
        "squad": language.SquadConfig,
        "text": language.TextConfig,
        "numbers": translation.NumbersConfig,
        "parallel_text": translation.ParallelTextConfig,
        "shapes": points.ShapesConfig,
        "point_files": points.PointFilesConfig,
        "drawings": generative.DrawingsConfig,
        "image_files": generative.ImageFilesConfig,
    }.items():
        store.store(group="schema/data", name=name, node=node, package="data")
    for name, node in {
        "cifar10": preparation.Cifar10PreparationConfig,
        "imagenet": preparation.ImageNetPreparationConfig,
        "squad": preparation.SquadPreparationConfig,
        "wiki": preparation.WikiPreparationConfig,
        "wmt_ende": preparation.WmtEnDePreparationConfig,
    }.items():
        store.store(group="schema/prepare", name=name, node=node, package="prepare")
    for name, node in {
        "bleu": translation.BleuConfig,
        "squad": language.SquadEvaluationConfig,
    }.items():
        store.store(group="schema/evaluation", name=name, node=node, package="evaluation")
