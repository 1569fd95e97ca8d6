"""A recipe so small that a round takes a fraction of a second on a busy core."""

from pathlib import Path

TEXT = (
    "It was a bright cold day in April, and the clocks were striking thirteen; "
    "the hands went round and the bells were heard far over the town.\n"
)


def write_small_recipe(
    folder: Path, *, rounds: int = 6, local_steps: int = 8, grace_s: float = 10.0, stale_rounds: int = 5
) -> Path:
    """Writes the recipe and the text that it trains on (`--data text.txt`); returns the recipe's path."""
    path = folder / "small.toml"
    path.write_text(
        f"""
name = "small"
rounds = {rounds}
local_steps = {local_steps}
stale_rounds = {stale_rounds}
data = "own"
[model]
dim = 32
layers = 1
heads = 2
key_value_heads = 1
hidden_dim = 64
context_length = 32
[inner]
batch_size = 4
warmup_steps = 5
learning_rate = 1e-2
[exchange]
grace_s = {grace_s}
[evaluation]
every_rounds = 3
batches = 2
"""
    )
    (folder / "text.txt").write_text(TEXT * 200)
    return path
