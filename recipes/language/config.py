"""Typed configurations of the language recipes and data sets; the classes they build stand beside this file."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from ..about import DataAbout, RecipeAbout


@dataclass
class BertConfig:
    """What both BERT recipes have."""

    about: RecipeAbout = field(default_factory=RecipeAbout)
    size: str = "small"
    """`tiny` (2 layers of 128), `small` (4 of 512), `medium` (8 of 512) or `base` (12 of 768)."""
    vocabulary: str | None = None
    """The data's vocab.txt; null is the embedded one."""
    positions: int = 512
    """Tokens of the longest sequence."""
    layers: int | None = None
    """This and the next three: in the place of the size's own."""
    hidden: int | None = None
    heads: int | None = None
    feed_forward: int | None = None
    dropout: float = 0.1
    weights: str | None = None
    """Folder of a Hugging Face BERT (config.json, model.safetensors); its size is then the model's."""
    lr: float = 1e-4
    weight_decay: float = 0.01
    warmup_steps: float = 0.1
    """Optimizer steps; below 1, a share of the whole run."""
    lr_decay: str = "linear"
    """`linear` to zero at the end, or `constant`."""


@dataclass
class BertPretrainingConfig(BertConfig):
    """Keyword arguments of `pretraining.BertPretraining`."""

    _target_: str = "pl_pipe.recipes.language.pretraining.BertPretraining"
    vocabulary_size: int | None = None
    """Where the data's vocab.txt is not given."""


@dataclass
class BertQuestionAnsweringConfig(BertConfig):
    """Keyword arguments of `question_answering.BertQuestionAnswering`."""

    _target_: str = "pl_pipe.recipes.language.question_answering.BertQuestionAnswering"
    lowercase: bool = True
    """As `data.lowercase`: a checkpoint is sealed with it."""


@dataclass
class TransformerLMConfig:
    """Keyword arguments of `transformer_lm.TransformerLM`."""

    _target_: str = "pl_pipe.recipes.language.transformer_lm.TransformerLM"
    about: RecipeAbout = field(default_factory=RecipeAbout)
    vocabulary_size: int = MISSING
    layers: int = 2
    hidden: int = 128
    heads: int = 2
    feed_forward: int | None = None
    """Null: as wide as `hidden`."""
    positions: int = 512
    dropout: float = 0.2
    tied: bool = False
    """Whether the output layer is the embedding."""
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: float = 0.05
    lr_decay: str = "linear"


@dataclass
class TextDataConfig:
    """Fields every language data set has."""

    about: DataAbout = field(default_factory=DataAbout)
    batch_size: int = 32
    """Sequences per process and step."""
    num_workers: int = 0
    """Loader processes per training process."""


@dataclass
class WikiConfig(TextDataConfig):
    """Keyword arguments of `pretraining_data.WikiData`."""

    _target_: str = "pl_pipe.recipes.language.pretraining_data.WikiData"
    root: str | None = None
    """Folder that holds HDF5 shards."""
    vocabulary: str | None = None
    """The vocab.txt that the shards were made with; where it is null, `vocabulary_size` is all that is known of it."""
    vocabulary_size: int | None = 30522
    val_share: float = 0.01
    """Of the rows, where no shard has val, dev or test in its name."""
    seed: int = 1
    """Of the order of blocks and batches."""


@dataclass
class SyntheticTextConfig(TextDataConfig):
    """Keyword arguments of `pretraining_data.SyntheticText`."""

    _target_: str = "pl_pipe.recipes.language.pretraining_data.SyntheticText"
    sequence_length: int = 32
    most_masked: int = 5
    num_documents: int = 512
    num_val_documents: int = 64
    seed: int = 0
    vocabulary: str | None = None
    vocabulary_size: int | None = None


@dataclass
class SquadConfig(TextDataConfig):
    """Keyword arguments of `squad_data.SquadData`."""

    _target_: str = "pl_pipe.recipes.language.squad_data.SquadData"
    root: str | None = None
    """Folder that holds train-v2.0.json and dev-v2.0.json; null is the embedded sample."""
    train_file: str | None = None
    val_file: str | None = None
    version: str = "2.0"
    """`1.1` where every question has an answer."""
    skip_misplaced: bool = False
    """Leave questions out of training whose answer is not where the file says, instead of an error."""
    vocabulary: str | None = None
    lowercase: bool = True
    window: int = 384
    """Tokens of a sequence."""
    stride: int = 128
    """Tokens by which the next window of a long paragraph begins later."""
    question: int = 64
    """Tokens of a question at most."""


@dataclass
class TextConfig(TextDataConfig):
    """Keyword arguments of `text_data.LanguageModelText`."""

    _target_: str = "pl_pipe.recipes.language.text_data.LanguageModelText"
    root: str | None = None
    """WikiText's folder, or a text file; null is the embedded prose."""
    unit: str = "word"
    """`word` (separated by spaces) or `character`."""
    vocabulary_size: int = 33278
    """The most frequent tokens have a number of their own, up to so many."""
    sequence_length: int = 32
    vocabulary: str | None = None
    """File of tokens, one a line, as a run keeps them (`vocabulary.txt`); null counts the training part's."""
    keep_vocabulary_in: str | None = None
    """Folder that gets a copy of the vocabulary when the first checkpoint is saved."""


@dataclass
class SquadEvaluationConfig:
    """Keyword arguments of `squad_evaluation.SquadEvaluation`."""

    _target_: str = "pl_pipe.recipes.language.squad_evaluation.SquadEvaluation"
    candidates: int = 20
    """Starts and ends of each window that are looked at."""
    longest: int = 30
    """Tokens of an answer at most."""
    null_threshold: float = 0.0
    """How much likelier than the best span it must be that there is no answer."""
