"""What `gasloc doctor` does: makes its checks one after another, and tells each line as it is known."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gasloc import diagnosis
from gasloc.card import read_card
from gasloc.diagnosis import Line
from gasloc.errors import GaslocError
from gasloc.recipe import Recipe, load
from peers.checks import LookOptions, look
from peers.errors import DaemonError, IdentityError, PeersError
from peers.exchange import PeerId
from peers.identity import Identity
from peers.p2pd import check_free
from peers.thread import NetworkThread

_KEPT_CHECKPOINTS = 4  # three, and the one that is being written
_CHECKPOINT_COPIES = 5  # weights, two AdamW moments, anchor, outer momentum; float32


@dataclass(frozen=True, slots=True)
class Examination:
    """What to look at."""

    folder: Path
    identity: Path | None
    """The key file; None where a new one would be made."""
    host: str
    port: int
    announce: tuple[str, ...]
    initial_peers: tuple[str, ...]
    recipe: str | None
    secret_file: Path | None = None


def examine(wanted: Examination, show: Callable[[Line], None]) -> list[Line]:
    """Makes every check, within about 20 s; `show` gets each line at once. Nothing is changed on disk."""
    lines: list[Line] = []

    def tell(*more: Line | None) -> None:
        for line in more:
            if line is not None:
                lines.append(line)
                show(line)

    recipe: Recipe | None = None
    if wanted.recipe is not None:
        try:
            recipe = load(wanted.recipe)
            tell(_understood(recipe))
        except GaslocError as error:
            tell(diagnosis.failure("recipe", str(error)))
    own_id, identity_words = None, "a new key"
    if wanted.identity is not None and wanted.identity.expanduser().exists():
        identity_words = f"key file {wanted.identity}"
        try:
            own_id = _claimable(wanted.identity)
        except IdentityError as error:
            tell(diagnosis.failure("identity", str(error)))
    swarms = _network(wanted, own_id, identity_words, tell)
    recipe = recipe or swarms
    needs = _needs(recipe) if recipe else (None, None)
    existing = next(path for path in (wanted.folder.absolute(), *wanted.folder.absolute().parents) if path.exists())
    tell(
        diagnosis.memory_line(free_memory_bytes(), needs[0]),
        diagnosis.disk_line(str(existing), shutil.disk_usage(existing).free, needs[1]),
    )
    return lines


def _network(
    wanted: Examination, own_id: PeerId | None, identity_words: str, tell: Callable[..., None]
) -> Recipe | None:
    """The checks that need p2pd; returns the recipe of the swarm's run, where there is one."""
    port = wanted.port
    try:
        if port:
            check_free(wanted.host, port)
        tell(diagnosis.port_line(port))
    except DaemonError as error:
        tell(diagnosis.failure("port", str(error)))
        port = 0  # and the rest can be looked at all the same
    thread = NetworkThread()
    try:
        seen = thread.call(
            look(
                LookOptions(
                    initial_peers=wanted.initial_peers,
                    host=wanted.host,
                    port=port,
                    announce=wanted.announce if port == wanted.port else (),
                    own_id=own_id,
                    ask_card=True,
                    secret_file=wanted.secret_file,
                )
            )
        )
    except PeersError as error:
        tell(diagnosis.failure("p2pd", str(error)))
        return None
    finally:
        thread.close()
    tell(Line("p2pd", True, "the network daemon starts"), *diagnosis.contact_lines(seen))
    tell(*diagnosis.address_lines(seen.addresses))
    if not seen.answering:
        return None
    if own_id is not None or identity_words == "a new key":
        tell(diagnosis.identity_line(seen, identity_words))
    tell(diagnosis.clock_line(seen))
    tell(diagnosis.dialback_line(seen) if port == wanted.port else None)
    if seen.card is None:
        return None
    try:
        recipe = read_card(seen.card)
    except GaslocError as error:
        tell(diagnosis.failure("recipe", str(error)))
        return None
    tell(Line("run", True, f"{seen.card.run}"), _understood(recipe))
    return recipe


def _understood(recipe: Recipe) -> Line:
    return Line("recipe", True, f"{recipe.name}, digest {recipe.digest[:12]}, is understood")


def _claimable(path: Path) -> PeerId:
    """The peer id in a key file. Raises `IdentityError`, also where a peer on this machine uses it now."""
    identity = Identity.load_or_create(path)
    identity.acquire()
    identity.release()
    return identity.peer_id


def _needs(recipe: Recipe) -> tuple[int, int]:
    """Memory and disk, in bytes, that a recipe's tensors need at one peer."""
    from gasloc.model import parameter_count

    parameters = parameter_count(recipe.model)
    # float32: weights, gradients, two AdamW moments, anchor, outer momentum, and what two partners send
    return 4 * parameters * 8, 4 * parameters * _CHECKPOINT_COPIES * _KEPT_CHECKPOINTS


def free_memory_bytes() -> int | None:
    """Memory that can be had without swapping, within the limits of a container; None where it is not known."""
    found = [value for value in (_available_bytes(), _left_in_container_bytes()) if value is not None]
    return min(found, default=None)


def _available_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):
        return None


def _left_in_container_bytes() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return max(int(limit) - int(used), 0)
    except (OSError, ValueError):
        return None
