"""Typed configurations of translation: recipes, data sets, evaluation. The classes stand beside this file."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from ..about import DataAbout, RecipeAbout


@dataclass
class TranslatorConfig:
    """Keyword arguments of `translator.Translator`."""

    _target_: str = "pl_pipe.recipes.translation.translator.Translator"
    about: RecipeAbout = field(default_factory=RecipeAbout)
    vocabulary_size: int = MISSING
    encoder_layers: int = MISSING
    decoder_layers: int = MISSING
    hidden_size: int = 1024
    dropout: float = 0.2
    share_embedding: bool = False
    """One embedding for both languages. It stands on the first stage of a pipeline then, which embeds targets too."""
    label_smoothing: float = 0.1
    lr: float = 1e-3
    weight_decay: float = 0.0
    lr_policy: str = "gnmt"
    """`gnmt` warms up and decays in steps, as the network's authors did; `polynomial` is PipeDream's."""
    warmup_steps: int = 200
    decay_from: float = 2 / 3
    """Share of the run after which the learning rate falls."""
    decay_times: int = 4
    decay_factor: float = 0.5
    lr_power: float = 2.0
    """Of `lr_policy=polynomial`: (1 - epoch / epochs) ** power."""


@dataclass
class TextAbout(DataAbout):
    """A parallel corpus's introduction."""

    hidden_size: int = 1024
    """Suggested hidden size of a network trained on this data; 1024 is the published network."""
    dropout: float | None = 0.2
    lr: float = 1e-3
    max_epochs: int = 10


@dataclass
class TranslationDataConfig:
    """Settings of `datamodule.TranslationData`."""

    about: TextAbout = field(default_factory=TextAbout)
    vocabulary: str | None = None
    """File of a vocabulary: JSON of the tokenizers library, or one token a line; null trains one."""
    vocabulary_size: int = 8_000
    vocabulary_lines: int = 1_000_000
    """Pairs, from the first, that a vocabulary is trained on."""
    max_length: int = 50
    """Pairs with more tokens on a side are left out of training and validation, and counted."""
    batch_size: int = 64
    """Pairs per process and step."""
    length_multiple: int = 8
    """Lengths are padded to multiples of this, so that batches have few shapes."""
    num_workers: int = 0
    order_seed: int = 0
    cache: str | None = None
    """Folder for vocabularies and encoded corpora; null is `translation` in `$PL_PIPE_CACHE` or `~/.cache/pl_pipe`."""
    keep_vocabulary_in: str | None = None
    """Folder that gets a copy of the vocabulary when the first checkpoint is saved."""


@dataclass
class NumbersConfig(TranslationDataConfig):
    """Keyword arguments of `numbers.numbers_data`."""

    _target_: str = "pl_pipe.recipes.translation.numbers.numbers_data"
    largest: int = 999
    sentences: int = 5_000
    held_out_sentences: int = 500
    """For validation, and as many for test."""
    held_out: float = 0.1
    """Share of the numbers that only validation has, and as many only test."""
    shortest: int = 1
    longest: int = 3
    """Numbers a sentence."""
    seed: int = 0


@dataclass
class ParallelTextConfig(TranslationDataConfig):
    """Keyword arguments of `parallel_text.parallel_text_data`."""

    _target_: str = "pl_pipe.recipes.translation.parallel_text.parallel_text_data"
    root: str | None = None
    """Folder that holds `<train>.<source_language>` and so on, plain or with `.gz`."""
    source_language: str = "en"
    target_language: str = "de"
    train: str = "train"
    val: str = "val"
    test: str = "test"
    source: str | None = None
    """File to translate in evaluation, instead of the root's test files; `reference` belongs to it."""
    reference: str | None = None
    pretokenized: bool = False
    """The files hold BPE tokens (`wer@@ de`); `vocabulary` then is a list of tokens."""


@dataclass
class BleuConfig:
    """Keyword arguments of `evaluation.BleuEvaluation`."""

    _target_: str = "pl_pipe.recipes.translation.evaluation.BleuEvaluation"
    beam_size: int = 5
    length_normalisation: float = 0.6
    coverage_penalty: float = 0.1
    batch_size: int = 64
    max_length_factor: float = 2.0
    """A translation ends at this many times its source's tokens, of which the end is one, and 10."""
    tokenize: str = "13a"
    """sacrebleu's tokenizer."""
    limit: int | None = None
    """Sentences to translate, from the first; null is all."""
