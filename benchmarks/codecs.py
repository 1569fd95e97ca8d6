"""What each codec costs and loses on real states: bytes, error, blocks sent again, speed.

    python -m benchmarks.codecs [--json FILE] [--strict]
    python -m benchmarks.codecs --loss [--quick | --rounds N --seeds N] [--json FILE] [--strict]

Workers train a small decoder as a swarm does, exchanging in float32. In the last rounds each pair of partners also
trades its parameters under every codec, over real streams in memory, and the bytes of those streams are counted, with
everything that goes along. Speed is that of one thread, on values as they are in those rounds.

With `--loss`, whole runs of eight simulated workers under each codec instead, see `benchmarks.codec_loss`: about a
quarter of an hour of processor time for three seeds of 200 rounds. Without all of it the bars say little.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch

from benchmarks import codec_loss
from benchmarks.bars import Bar, add_options, finish
from gasloc import corpus, inner, mixing, model, sampler, topology
from gasloc.outer import OuterStep, make_outer
from gasloc.recipe import Recipe
from peers import codec as codecs
from peers import compiled, quantize
from peers.codec import CODECS, CodecName
from peers.exchange import Answer, Offer, Slot, Tensors
from peers.modular import PIECE_ELEMENTS
from peers.pipes import PipeNetwork
from peers.quantize import Bits
from peers.stream_exchange import StreamExchange

BARS = {"modular8": 0.27, "modular4": 0.14}
TOPOLOGIES = ("2-peer", "1-peer")
BITS: dict[str, Bits] = {"modular8": 8, "modular4": 4}


@dataclass(frozen=True)
class State:
    """One worker at the end of its local steps."""

    theta: dict[str, torch.Tensor]
    phi: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One codec under one topology, means over all trades."""

    topology: str
    codec: str
    bytes_of_fp32: float
    """Bytes sent over the parameters' bytes in float32."""
    error_of_movement: float
    """Root mean square of the error, over that of the parameters' movement in the round."""
    resent: float
    """Share of blocks that were sent again: at 4 bits first in 8, then as they are."""


def train(recipe: Recipe, workers: int, rounds: int, kept_rounds: int) -> Iterator[tuple[int, dict[str, State]]]:
    """Trains the first rounds of a recipe; yields the last ones' numbers and states."""
    tokens = corpus.load(recipe.data).train
    peers = [f"worker-{number}" for number in range(workers)]
    models = {peer: model.build(recipe.model, recipe.seed) for peer in peers}
    optimizers = {peer: inner.make_inner(models[peer], recipe.inner) for peer in peers}
    thetas = {peer: _copy(models[peer]) for peer in peers}
    outer = {peer: OuterStep(thetas[peer], make_outer(recipe.outer)) for peer in peers}
    for round_ in range(rounds):
        for peer in peers:
            _local_steps(recipe, peer, models[peer], optimizers[peer], tokens, round_)
        phis = {peer: _copy(models[peer]) for peer in peers}
        if round_ >= rounds - kept_rounds:
            yield round_, {peer: State(_clone(thetas[peer]), phis[peer]) for peer in peers}
        for peer in peers:
            weights = topology.row(recipe.topology, round=round_, members=peers, me=peer, seed=recipe.seed)
            received = {other: phis[other] for other in weights if other != peer}
            outer[peer].step(mixing.mix(phis[peer], received, weights, peer))
            with torch.no_grad():
                for name, parameter in models[peer].named_parameters():
                    parameter.copy_(thetas[peer][name])


def _local_steps(
    recipe: Recipe,
    peer: str,
    decoder: model.Decoder,
    optimizer: torch.optim.Optimizer,
    tokens: sampler.Tokens,
    round_: int,
) -> None:
    for step in range(round_ * recipe.local_steps, (round_ + 1) * recipe.local_steps):
        inner.set_learning_rate(optimizer, inner.learning_rate(step, recipe.inner, recipe.total_steps))
        inputs, targets = sampler.batch(
            tokens,
            peer_id=peer,
            step=step,
            seed=recipe.seed,
            batch_size=recipe.inner.batch_size,
            context_length=recipe.model.context_length,
        )
        torch.autograd.backward([decoder.loss(inputs, targets)])
        inner.clip(decoder, recipe.inner)
        optimizer.step()
        optimizer.zero_grad()


def _copy(decoder: model.Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}


def _clone(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


async def trade(codec: CodecName, one: State, other: State) -> tuple[int, Tensors]:
    """Bytes that the first sent, and what the second received."""
    network = PipeNetwork()
    exchanges = [StreamExchange(network.join(me), run="r", digest="d", codec=codec) for me in "AB"]
    for exchange in exchanges:
        await exchange.start()
    sent, received = await asyncio.gather(
        exchanges[0].swap(Slot(0), {"B": Offer(one.phi, start=one.theta)}, timeout_s=60.0),
        exchanges[1].swap(Slot(0), {"A": Offer(other.phi, start=other.theta)}, timeout_s=60.0),
    )
    swap = received["A"]
    if swap.answer is not Answer.ACCEPT or swap.tensors is None:
        raise RuntimeError(f"a trade in memory failed: {swap.reason}")
    return sent["B"].bytes_sent, swap.tensors


def measure(name: str, codec: CodecName, pairs: list[tuple[State, State]]) -> Row:
    """One codec over all pairs."""
    shares, errors, resent = [], [], []
    for one, other in pairs:
        size_bytes, received = asyncio.run(trade(codec, one, other))
        shares.append(size_bytes / (4 * sum(tensor.numel() for tensor in one.phi.values())))
        moved = {name: one.phi[name] - one.theta[name] for name in one.phi}
        apart = {name: received[name] - one.phi[name] for name in one.phi}
        errors.append((mixing.squared_norm(apart) / mixing.squared_norm(moved)) ** 0.5)
        resent.append(share_resent(BITS[codec], one, other) if codec in BITS else 0.0)
    return Row(name, codec, statistics.mean(shares), statistics.mean(errors), statistics.mean(resent))


def share_resent(bits: Bits, one: State, other: State) -> float:
    """The share of all quantized blocks in which the range was too small."""
    wrong = []
    for name, phi in one.phi.items():
        if phi.dim() >= 2:
            sent, near = phi.reshape(-1), other.phi[name].reshape(-1)
            step = _steps(bits, sent, one.theta[name].reshape(-1), near, other.theta[name].reshape(-1))
            codes = quantize.encode(sent, step, bits, torch.Generator().manual_seed(0))
            wrong.append(quantize.decode(codes, near, step, bits)[1])
    return float(torch.cat(wrong).float().mean())


def _steps(
    bits: Bits, sent: torch.Tensor, sent_start: torch.Tensor, near: torch.Tensor, near_start: torch.Tensor
) -> torch.Tensor:
    ours, theirs = quantize.movement_bounds(sent, sent_start), quantize.movement_bounds(near, near_start)
    return quantize.steps(ours, theirs, bits)


def speeds(one: State, other: State, repeats: int) -> dict[str, tuple[float, float]]:
    """GB of float32 a second, encoding and decoding, by codec; the best of some, one thread."""
    rows = [
        torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])
        for tensors in (one.phi, one.theta, other.phi, other.theta)
    ]
    sent, sent_start, near, near_start = (row.repeat(-(-PIECE_ELEMENTS // len(row)))[:PIECE_ELEMENTS] for row in rows)
    noise = torch.Generator().manual_seed(0)
    result: dict[str, tuple[float, float]] = {}
    for codec in CODECS:
        if codec in BITS:
            bits = BITS[codec]
            step = _steps(bits, sent, sent_start, near, near_start)
            encode = partial(quantize.encode, sent, step, bits, noise)
            decode: Callable[[], object] = partial(quantize.decode, encode(), near, step, bits)
            result[codec] = (_rate(encode, repeats), _rate(decode, repeats))
        elif codec == "int8":
            decode = partial(quantize.int8_decode, *quantize.int8_encode(sent), torch.float32)
            result[codec] = (_rate(partial(quantize.int8_encode, sent), repeats), _rate(decode, repeats))
        else:
            dtype = codecs.wire_dtype(codec, sent)
            narrow = partial(codecs.encode, sent, dtype)
            decode = partial(codecs.decode, narrow(), dtype, torch.empty_like(sent))
            result[codec] = (_rate(narrow, repeats), _rate(decode, repeats))
    return result


def _rate(call: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return 4 * PIECE_ELEMENTS / best / 1e9


def main() -> int:
    """Prints the table and the bars; 1 where a bar is short and that was to be strict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, help="of a schedule of 30, 8 unless given; with --loss all, 200")
    parser.add_argument("--kept-rounds", type=int, default=3, help="last rounds in which codecs are measured")
    parser.add_argument("--repeats", type=int, default=50, help="of each speed; the best counts")
    loss = parser.add_argument_group("--loss")
    loss.add_argument("--loss", action="store_true", help="the loss that each codec comes to")
    loss.add_argument("--quick", action="store_true", help="one seed of 10 rounds")
    loss.add_argument("--seeds", type=int, default=3)
    loss.add_argument("--jobs", type=int, default=2, help="processes at once, one thread each")
    loss.add_argument("--barred-only", action="store_true", help="only the rows that bars are about")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.loss:
        return losses(options)
    rounds = options.rounds or 8

    rows: list[Row] = []
    pairs: list[tuple[State, State]] = []
    for name in TOPOLOGIES:
        recipe = Recipe(topology=name)
        pairs = []
        for round_, states in train(recipe, options.workers, rounds, options.kept_rounds):
            for peer in states:
                weights = topology.row(name, round=round_, members=list(states), me=peer, seed=recipe.seed)
                pairs += [(states[peer], states[other]) for other in weights if other != peer]
        rows += [measure(name, codec, pairs) for codec in CODECS]
    print(f"codes are made {compiled.prepare()}")
    rates = speeds(*pairs[0], options.repeats)
    parameters = sum(tensor.numel() for tensor in pairs[0][0].phi.values())
    print(f"{parameters:,} parameters, {options.workers} workers, the last {options.kept_rounds} of {rounds}")
    print(f"{'codec':10} {'topology':9} {'bytes/fp32':>10} {'error/movement':>15} {'resent':>8} {'GB/s enc, dec':>15}")
    for row in rows:
        encode, decode = rates[row.codec]
        print(
            f"{row.codec:10} {row.topology:9} {row.bytes_of_fp32:10.4f} {row.error_of_movement:15.2e} "
            f"{row.resent:8.2%} {encode:8.2f} {decode:6.2f}"
        )
    worst = {name: max(row.bytes_of_fp32 for row in rows if row.codec == name) for name in BARS}
    bars = [Bar(f"{name}_bytes", worst[name], limit, at_least=False) for name, limit in BARS.items()]
    figures = {"rows": [asdict(row) for row in rows], "gb_per_s": rates, "parameters": parameters}
    return finish(bars, figures, json_path=options.json, strict=options.strict)


def losses(options: argparse.Namespace) -> int:
    """Runs `codec_loss`; what is known is printed, and written to the file of figures, as it comes."""
    rounds, seeds = (10, 1) if options.quick else (options.rounds or 200, options.seeds)
    runs: list[codec_loss.Run] = []
    seconds = 0.0
    for job, came, seconds in codec_loss.run_all(
        codec_loss.jobs(seeds, rounds, barred_only=options.barred_only), options.jobs
    ):
        runs += came
        sys.stdout.write(f"{seconds:6.0f} s  seed {job.seed}: {', '.join(job.rows)}\n")
        sys.stdout.flush()
        if options.json:
            codec_loss.save(options.json, codec_loss.figures(runs, rounds, seconds))
    lines = codec_loss.table(runs)
    sys.stdout.write(codec_loss.text(lines) + "\n")
    figures = codec_loss.figures(runs, rounds, seconds)
    return finish(codec_loss.bars(lines), figures, json_path=options.json, strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
