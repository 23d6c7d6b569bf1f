"""The workloads: chats of made-up but plain English, the same on every machine for the same seed.

A workload is closed: ``users`` users work through the sessions in order, each waits for an answer before the next
message is sent, and a session's history holds the model's own answers. Answers have a fixed length (end tokens are
ignored), so every mode does the same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

NAMES = ("mixed", "shared-prefix", "decode-heavy", "multi-turn", "single", "long-prefill")
# Users of the recorded mixed trace at scale 1.
MIXED_SESSIONS = 64

_THINGS = "boat bridge clock forest garden harbour house island lantern letter market mill mountain orchard river road "
_THINGS += "school station table theatre tower train village wall window workshop"
_QUALITIES = "old quiet bright narrow broken wooden distant cheap famous green heavy hollow late modern plain round"
_PEOPLE = "Ada Bruno Carla David Elif Farid Greta Hugo Ines Jonas Karin Luis Mira Nils Olga Pavel Rosa Tomas Vera Yusuf"
_ACTS = "builds cleans draws finds guards leaves measures moves opens paints plans repairs sells visits watches"
_SENTENCES = (
    "{who} {acts} the {quality} {thing} near the {other} before {number} o'clock.",
    "Nobody in the {thing} has seen the {quality} {other} since {who} left {number} days ago.",
    "The {quality} {thing} belongs to {who}, who {acts} it every {number} weeks.",
    "When the {thing} is {quality}, {who} {acts} the {other} and writes down the number {number}.",
)
_QUESTIONS = (
    "What should {who} know about the {quality} {thing}?",
    "Tell me a story about {who}, who {acts} the {quality} {thing} beside the {other}.",
    "Why is the {thing} so {quality}, and what has {who} to do with it?",
    "Explain in plain words how {who} {acts} a {quality} {thing}.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message, and how many tokens the answer gets."""

    text: str
    answer: int


@dataclass(frozen=True, slots=True)
class Session:
    """A chat: an optional system prompt and the user's messages."""

    system: str | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    users: int
    sessions: tuple[Session, ...]


def _fill(rng: Random, pattern: str) -> str:
    return pattern.format(
        who=rng.choice(_PEOPLE.split()),
        acts=rng.choice(_ACTS.split()),
        quality=rng.choice(_QUALITIES.split()),
        thing=rng.choice(_THINGS.split()),
        other=rng.choice(_THINGS.split()),
        number=rng.randint(2, 99),
    )


def _prose(rng: Random, sentences: int) -> str:
    return " ".join(_fill(rng, rng.choice(_SENTENCES)) for _ in range(sentences))


def _question(rng: Random, sentences: int = 0) -> str:
    return " ".join(filter(None, (_prose(rng, sentences), _fill(rng, rng.choice(_QUESTIONS)))))


def _mixed(seed: int, sessions: int, answers: float) -> list[Session]:
    """Assistants with a shared system prompt, readers of long documents, quick questions, long stories."""
    house = "You answer for the town museum. " + _prose(Random(f"{seed}/mixed/house"), 12)
    reader = "You read documents and answer questions about them. " + _prose(Random(f"{seed}/mixed/reader"), 4)
    made: list[Session] = []
    for i in range(sessions):
        rng = Random(f"{seed}/mixed/{i}")

        def answer(low: int, high: int, rng: Random = rng) -> int:
            return max(2, round(rng.randint(low, high) * answers))

        kind = i % 4
        if kind == 0:
            turns = [Turn(_question(rng, rng.randint(0, 1)), answer(16, 64)) for _ in range(rng.randint(2, 4))]
            made.append(Session(house, tuple(turns)))
        elif kind == 1:
            turns = [Turn(_question(rng, rng.randint(20, 45)), answer(24, 96))]
            turns += [Turn(_question(rng), answer(16, 64)) for _ in range(rng.randint(0, 1))]
            made.append(Session(reader, tuple(turns)))
        elif kind == 2:
            made.append(Session(None, (Turn(_question(rng), answer(8, 32)),)))
        else:
            made.append(Session(None, (Turn(_question(rng, 1), answer(120, 300)),)))
    return made


def build(name: str, seed: int = 1, scale: float = 1.0, answers: float = 1.0) -> Workload:
    """The workload of that name.

    Args:
        scale: multiplies the number of sessions; the first ones stay the same.
        answers: multiplies the lengths of the answers.

    Raises: KeyError for an unknown name.
    """

    def count(n: int) -> int:
        return max(1, round(n * scale))

    def length(n: int) -> int:
        return max(2, round(n * answers))

    def chats(n: int, system: int, question: int, answer: int, turns: int = 1) -> list[Session]:
        """n chats of their own; system prompt and questions in sentences."""
        made: list[Session] = []
        for i in range(count(n)):
            rng = Random(f"{seed}/{name}/{i}")
            head = _prose(rng, system) if system else None
            made.append(Session(head, tuple(Turn(_question(rng, question), length(answer)) for _ in range(turns))))
        return made

    if name == "mixed":
        return Workload(name, 32, tuple(_mixed(seed, count(MIXED_SESSIONS), answers)))
    if name == "shared-prefix":
        system = "You work in one office with many rules. " + _prose(Random(f"{seed}/{name}/system"), 48)
        sessions = [Session(system, s.turns) for s in chats(32, 0, 1, 64)]
        return Workload(name, 16, tuple(sessions))
    shapes = {
        "decode-heavy": (16, chats(16, 1, 0, 128)),
        "multi-turn": (8, chats(8, 6, 1, 48, turns=5)),
        "single": (1, chats(5, 1, 0, 128)),
        "long-prefill": (2, chats(6, 72, 0, 16)),
    }
    users, sessions = shapes[name]
    return Workload(name, users, tuple(sessions))
