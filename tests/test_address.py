"""Multiaddresses: what is taken, what is refused with which words, and what is told to others first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.address import Address, Reach, announced, best_first, listening, parse, reach
from peers.errors import AddressError
from peers.identity import peer_id_of

ID = peer_id_of(bytes(range(32)))
OTHER = peer_id_of(bytes(32))
RSA_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.parametrize(
    "maddr",
    [
        "/ip4/203.0.113.5/tcp/31337",
        "/ip6/2001:db8::1/tcp/1",
        "/dns4/peer.example.org/tcp/65535",
        "/dns/peer.example.org/tcp/80",
        "/ip4/203.0.113.5/udp/4001/quic-v1",
        f"/ip4/203.0.113.5/tcp/31337/p2p/{OTHER}/p2p-circuit",
    ],
)
def test_well_formed_addresses_are_taken_apart_and_put_together(maddr: str) -> None:
    text = f"{maddr}/p2p/{ID}"
    assert parse(text) == Address(maddr, ID)
    assert str(parse(f"  {text}\n")) == text


def test_an_rsa_peer_id_is_taken() -> None:
    assert parse(f"/ip4/1.2.3.4/tcp/5/p2p/{RSA_ID}").peer_id == RSA_ID


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must start with '/'"),
        ("localhost:4001", "must start with '/'"),
        ("/ip4/1.2.3.4/tcp/4001", "peer id"),
        ("/ip4/1.2.3.4/tcp/4001/p2p/", "peer id"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{ID[:-3]}", "not a whole peer id"),
        (f"/ip4/1.2.3.4/tcp/4001/p2p/{ID[:-3]}0OI", "base58"),
        (f"/ip4/1.2.3.4/p2p/{ID}", "port"),
        (f"/ip4/1.2.3.4/tcp/p2p/{ID}", "port"),
        (f"/ip4/1.2.3.4/tcp/0/p2p/{ID}", "port '0'"),
        (f"/ip4/1.2.3.4/tcp/65536/p2p/{ID}", "port '65536'"),
        (f"/ip4/1.2.3.4/tcp/x/p2p/{ID}", "port 'x'"),
        (f"/ip4/1.2.3.4/tcp/\N{SUPERSCRIPT TWO}/p2p/{ID}", "port"),
        (f"/ip4/1.2.3/tcp/1/p2p/{ID}", "'1.2.3' is not an IP address"),
        (f"/ip6/1.2.3.4/tcp/1/p2p/{ID}", "IPv4 address behind /ip6"),
        (f"/dns4//tcp/1/p2p/{ID}", "name"),
        (f"/unix/tmp/x/p2p/{ID}", "must start with one of"),
        (f"/ip4/1.2.3.4/tcp/1/ws/p2p/{ID}", "'/ws'"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{OTHER}/p2p/{ID}", "comes twice"),
    ],
)
def test_malformed_text_is_refused_with_the_text_the_reason_and_the_form(text: str, reason: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse(text)
    words = str(caught.value)
    assert reason in words
    assert f"'{text}'" in words
    assert "/ip4/203.0.113.5/tcp/31337/p2p/" in words
    assert "\n" not in words


@given(st.text() | st.from_regex(r"/(ip4|ip6|dns4)/[^/]*/tcp/[^/]*/p2p/.*"))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        address = parse(text)
    except AddressError:
        return
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("/ip4/8.8.8.8/tcp/1", Reach.PUBLIC),
        ("/dns4/peer.example.org/tcp/1", Reach.PUBLIC),
        ("/ip4/10.0.0.2/tcp/1", Reach.LAN),
        ("/ip4/192.168.1.7/tcp/1/p2p/x", Reach.LAN),
        ("/ip6/fe80::1/tcp/1", Reach.LAN),
        ("/ip4/172.17.0.1/tcp/1", Reach.BRIDGE),
        ("/ip4/127.0.0.1/tcp/1", Reach.LOOPBACK),
        ("/ip6/::1/tcp/1", Reach.LOOPBACK),
        ("/ip4/8.8.8.8/tcp/1/p2p/x/p2p-circuit", Reach.RELAY),
    ],
)
def test_reach(address: str, expected: Reach) -> None:
    assert reach(address) is expected


def test_public_addresses_come_first_and_loopback_last() -> None:
    given_ = [
        "/ip4/127.0.0.1/tcp/9",
        "/ip4/172.17.0.1/tcp/9",
        "/ip4/192.168.1.7/tcp/9",
        "/ip4/10.0.0.7/tcp/9",
        "/ip4/8.8.8.8/tcp/9",
        "/ip4/192.168.1.7/tcp/9",
        "/ip4/8.8.4.4/tcp/0",
        f"/ip4/9.9.9.9/tcp/0/p2p/{ID}",
    ]
    assert best_first(given_) == [
        "/ip4/8.8.8.8/tcp/9",
        "/ip4/192.168.1.7/tcp/9",
        "/ip4/10.0.0.7/tcp/9",
        "/ip4/172.17.0.1/tcp/9",
        "/ip4/127.0.0.1/tcp/9",
    ]


@given(st.lists(st.from_regex(r"/ip4/(8\.8\.8\.8|10\.0\.0\.1|127\.0\.0\.1)/tcp/[0-3]", fullmatch=True)))
def test_best_first_keeps_each_dialable_address_once(addresses: list[str]) -> None:
    best = best_first(addresses)
    assert set(best) == {address for address in addresses if not address.endswith("/0")}
    assert len(best) == len(set(best))
    assert [reach(address) for address in best] == sorted(reach(address) for address in best)


def test_what_to_listen_on() -> None:
    assert listening("0.0.0.0", 0) == "/ip4/0.0.0.0/tcp/0"
    assert listening("::1", 31337) == "/ip6/::1/tcp/31337"
    with pytest.raises(AddressError, match=r"'localhost' is not an IP address; use 0\.0\.0\.0"):
        listening("localhost", 0)
    with pytest.raises(AddressError, match="port 65536"):
        listening("0.0.0.0", 65_536)


def test_what_to_announce() -> None:
    assert announced("203.0.113.5", 31337) == "/ip4/203.0.113.5/tcp/31337"
    assert announced("2001:db8::1", 1) == "/ip6/2001:db8::1/tcp/1"
    assert announced(f"/dns4/me.example.org/tcp/80/p2p/{ID}", 0) == "/dns4/me.example.org/tcp/80"
    with pytest.raises(AddressError, match="fixed port"):
        announced("203.0.113.5", 0)
    with pytest.raises(AddressError, match="neither an IP address nor"):
        announced("me.example.org", 1)
    with pytest.raises(AddressError, match="port '0'"):
        announced("/ip4/203.0.113.5/tcp/0", 31337)
