"""What one trade sends and restores from, made of an offer; and the noise that rounds it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from peers import codec
from peers.body import Body
from peers.codec import CodecName
from peers.exchange import Offer, PeerId, Slot, Tensors


@dataclass(frozen=True, slots=True)
class Bodies:
    """What one partner is sent, and our own values of what it sends: the same body where both send the same."""

    send: Body
    near: Body


def bodies(offers: Mapping[PeerId, Offer], codec_name: CodecName) -> dict[PeerId, Bodies]:
    """Each partner's bodies; tensors that go to several partners are read once. Raises as `Body` does."""
    made: dict[tuple[int, int], Body] = {}

    def body(tensors: Tensors, start: Tensors | None) -> Body:
        key = id(tensors), id(start)
        if key not in made:
            made[key] = Body(tensors, codec_name, start)
        return made[key]

    def near(offer: Offer) -> Tensors:
        return offer.send if offer.near is None or codec_name not in codec.MODULAR_CODECS else offer.near

    return {
        partner: Bodies(body(offer.send, offer.start), body(near(offer), offer.start))
        for partner, offer in offers.items()
    }


def noise(sender: PeerId, receiver: PeerId, slot: Slot) -> torch.Generator:
    """The noise that rounds what is sent: another in every trade and each way, and the same if it is repeated."""
    words = repr((sender, receiver, slot.round, slot.mix, slot.phase)).encode()
    seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
    return torch.Generator().manual_seed(seed)
