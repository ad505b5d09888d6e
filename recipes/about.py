"""What a recipe or data set says of itself. Shown by the listing commands, never passed to the class it describes."""

from dataclasses import dataclass, field


@dataclass
class RecipeAbout:
    """A recipe's introduction, and what the rest of the configuration may ask of it."""

    summary: str = ""
    data: list[str] = field(default_factory=list)
    """Data sets the recipe trains on, the default first."""
    small_image_size: int = 32
    """Image side used with small images (`digits`, `synthetic`, `cifar10`): the least the network makes sense at."""
    monitor: str = "val_loss"
    """Logged metric by which the best checkpoint is chosen."""
    mode: str = "min"
    some_parameters_unused: bool = False
    """Whether one backward may leave parameters without a gradient; strategy=ddp then looks for them."""


@dataclass
class DataAbout:
    """A data set's introduction."""

    summary: str = ""
    width: float = 1.0
    """Suggested width of a network trained on this data; 1 is the published network."""
    dropout: float | None = None
    """Suggested dropout; null is the published network's."""
