"""Every error that this package raises.

    GaslocError
    ├── UsageError              the user's input is wrong: exit code 2
    │   ├── RecipeError         a recipe has an unknown, impossible or diverging value
    │   └── DataError           the text to train on is missing or too short
    ├── CheckpointError         a checkpoint is not whole, or belongs to another run
    ├── RunError                the run cannot go on, or cannot be joined: exit code 1
    └── ModelError              a model does not fit the run's layout

A message names the value, the reason and what to do. `gasloc.cli` prints it as one line.
"""


class GaslocError(Exception):
    """Base of all errors here. Its text is one line, fit for a user."""


class UsageError(GaslocError):
    """Raised when what the user typed cannot be done; nothing was started."""


class RecipeError(UsageError):
    """Raised when a recipe has an unknown or impossible value."""


class DataError(UsageError):
    """Raised when the training text is missing, unreadable or too short."""


class CheckpointError(GaslocError):
    """Raised when a checkpoint is not whole or belongs to another run; nothing was loaded."""


class RunError(GaslocError):
    """Raised when a run cannot be joined or cannot go on."""


class ModelError(GaslocError):
    """Raised when a model's tensors differ from the run's; names the first difference."""
