"""Chaos: which faults a run is to suffer on purpose, and when."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from decimal import Decimal
from typing import Final, Literal, TypeVar, get_args

from ..errors import ConfigError, did_you_mean

Action = Literal["kill", "stop", "exit", "raise", "hang", "slow", "leave", "lose"]
Target = Literal["rank", "node"]
Point = Literal["step", "start", "validation", "snapshot", "checkpoint"]
Name = TypeVar("Name", bound=str)

ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
TARGETS: Final[tuple[Target, ...]] = get_args(Target)
POINTS: Final[tuple[Point, ...]] = get_args(Point)

_OPTIONS: Final[Mapping[Action, tuple[str, ...]]] = {
    "kill": ("delay",),
    "stop": ("delay",),
    "exit": ("code", "delay"),
    "raise": (),
    "hang": (),
    "slow": ("ms",),
    "leave": ("delay",),
    "lose": ("delay",),
}
_DRAWN: Final = "kill/stop"  # of which kinds random faults are by default
_EVENT: Final = "'ACTION:rank=R@step=N', such as 'kill:rank=1@step=50'"
_RANDOM: Final = "'random:seed=S@seconds=A-B', such as 'random:seed=3@seconds=5-10'"


@dataclass(frozen=True)
class Event:
    """One fault: what happens to whom at which point of the run."""

    action: Action
    target: Target
    index: int
    """The rank or the node, as they are numbered in the round that comes to the point."""
    point: Point
    number: int
    code: int = 1
    ms: float = 100.0
    delay: float = 0.0

    def __str__(self) -> str:
        """Return the text that is read as this event."""
        values = {"code": (self.code, 1), "ms": (self.ms, 100.0), "delay": (self.delay, 0.0)}
        options = [f"+{name}={_plain(value)}" for name, (value, default) in values.items() if value != default]
        return f"{self.action}:{self.target}={self.index}{''.join(options)}@{self.point}={self.number}"


@dataclass(frozen=True)
class RandomFaults:
    """Faults without end, at moments, on ranks and of kinds that are drawn; all ranks draw alike."""

    seed: int
    shortest: float
    longest: float
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        """Return the text that is read as these faults."""
        actions = "/".join(self.actions)
        option = "" if actions == _DRAWN else f"+actions={actions}"
        return f"random:seed={self.seed}{option}@seconds={_plain(self.shortest)}-{_plain(self.longest)}"

    def draw(self, number: int, world_size: int) -> tuple[float, Action, int]:
        """Return, of one fault, the seconds since the one before or the restart, its action, and the rank."""
        drawn = random.Random(f"{self.seed}/{number}")
        seconds = drawn.uniform(self.shortest, self.longest)
        return seconds, drawn.choice(self.actions), int(drawn.random() * world_size)


@dataclass(frozen=True)
class Chaos:
    """The faults of a drill, read from a text: ``Chaos("kill:rank=1@step=50, leave:node=1@step=120")``.

    Events are separated by commas or spaces, and each is ``ACTION:TARGET@POINT``, with options after the target:
    ``exit:rank=0+code=3@step=7``. Each happens once in a run, also when its point is passed again after a restart; two
    equal ones happen at the first and the second time. One whose target is not there at its point does not happen.

    ============================== ===================================================================================
    ``kill``                       SIGKILL to the process
    ``stop``                       SIGSTOP to the process, which then lives and does nothing
    ``exit+code=1``                the process ends at once, with that code
    ``raise``                      a RuntimeError in the step
    ``hang``                       the process sleeps for ever, where it is
    ``slow+ms=100``                the process sleeps so long before each of its steps from then on, until it ends
    ``leave``                      the node's agent is asked to leave the run
    ``lose``                       the node's agent is killed, with its workers: a node that is lost without a word
    ``:rank=R``                    that worker, or the node that it is on
    ``:node=N``                    that node, its first worker; ``kill`` and ``stop`` all its workers
    ``@step=N``                    before the forward of the first micro-batch of step N: N - 1 are complete
    ``@start=R``                   when round R starts: its workers are connected, and nothing is loaded yet; 0 is first
    ``@validation=N``              when this process begins its N-th validation, the sanity check not counted
    ``@checkpoint=N``              when this process begins to take the state for its N-th checkpoint
    ``@snapshot=N``                when this process begins to take the state for its N-th snapshot in memory
    ``+delay=0.5``                 so many seconds after the point, wherever the process is then (``kill``, ``stop``,
                                   ``exit``, ``leave`` and ``lose``)
    ============================== ===================================================================================

    A rank without samples in step N does not come to that point. ``random:seed=3@seconds=5-10`` is a fault every 5 to
    10 seconds of training, at the next step, on any rank; ``+actions=kill/hang`` says of which kinds, by default
    ``kill/stop``.

    Raises:
        ConfigError: for a text that cannot be read.
    """

    text: InitVar[str] = ""
    events: tuple[Event, ...] = field(init=False)
    at_random: RandomFaults | None = field(init=False)

    def __post_init__(self, text: str) -> None:
        pieces = [piece for piece in re.split(r"[,\s]+", text) if piece]
        drawn = [piece for piece in pieces if piece.startswith("random")]
        if len(drawn) > 1:
            raise ConfigError(f"chaos: {' and '.join(map(repr, drawn))} cannot be both; keep one of them.")
        object.__setattr__(self, "events", tuple(_event(piece) for piece in pieces if piece not in drawn))
        object.__setattr__(self, "at_random", _random_faults(drawn[0]) if drawn else None)

    @classmethod
    def random(
        cls, seed: int, every: tuple[float, float] = (5.0, 10.0), actions: Iterable[str] = ("kill", "stop")
    ) -> Chaos:
        """Return faults at random moments, so many seconds apart.

        Raises:
            ConfigError: for numbers or actions that cannot be.
        """
        return cls(f"random:seed={seed}+actions={'/'.join(actions)}@seconds={_plain(every[0])}-{_plain(every[1])}")

    def __bool__(self) -> bool:
        """Return whether there is any fault."""
        return bool(self.events) or self.at_random is not None

    def __str__(self) -> str:
        """Return the text that is read as this."""
        drawn = () if self.at_random is None else (self.at_random,)
        return ", ".join(map(str, (*self.events, *drawn)))


# --- reading ---------------------------------------------------------------------------------------------------------


def _event(piece: str) -> Event:
    what, _, when = piece.partition("@")
    action_name, _, rest = what.partition(":")
    target_text, *option_texts = rest.split("+")
    action = _one_of(action_name, ACTIONS, "action", piece, _EVENT)
    target_name, index = _pair(target_text, "target", piece, _EVENT)
    point_name, number = _pair(when, "point", piece, _EVENT)
    target = _one_of(target_name, TARGETS, "target", piece, _EVENT)
    point = _one_of(point_name, POINTS, "point", piece, _EVENT)
    options = dict(_pair(text, "option", piece, _EVENT) for text in option_texts)
    for name in options:
        if not _OPTIONS[action]:
            raise ConfigError(f"chaos: {name!r} in {piece!r}: {action} has no options; leave it out.")
        _one_of(name, _OPTIONS[action], f"option of {action}", piece, _EVENT)
    return Event(
        action,
        target,
        _whole(index, target, piece),
        point,
        _whole(number, point, piece, least=0 if point == "start" else 1),
        code=_whole(options.get("code", "1"), "code", piece, most=255),
        ms=_number(options.get("ms", "100"), "ms", piece),
        delay=_number(options.get("delay", "0"), "delay", piece),
    )


def _random_faults(piece: str) -> RandomFaults:
    what, _, when = piece.partition("@")
    action_name, _, rest = what.partition(":")
    texts = dict(_pair(text, "option", piece, _RANDOM) for text in filter(None, rest.split("+")))
    point_name, seconds = _pair(when, "point", piece, _RANDOM)
    _one_of(action_name, ("random",), "action", piece, _RANDOM)
    _one_of(point_name, ("seconds",), "point", piece, _RANDOM)
    for name in texts:
        _one_of(name, ("seed", "actions"), "option", piece, _RANDOM)
    if "seed" not in texts:
        raise ConfigError(f"chaos: {piece!r} has no seed; write {_RANDOM}.")
    shortest, _, longest = seconds.partition("-")
    faults = RandomFaults(
        _whole(texts["seed"], "seed", piece),
        _number(shortest, "seconds", piece),
        _number(longest or shortest, "seconds", piece),
        tuple(
            _one_of(name, ACTIONS, "action", piece, _RANDOM) for name in texts.get("actions", "kill/stop").split("/")
        ),
    )
    if faults.longest < faults.shortest:
        raise ConfigError(f"chaos: seconds={seconds} in {piece!r} go backwards; write {longest}-{shortest}.")
    return faults


def _pair(text: str, what: str, piece: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        found = f"{text!r} in {piece!r} is no {what}" if text else f"{piece!r} has no {what}"
        raise ConfigError(f"chaos: {found}; write {form}.")
    return name, value


def _one_of(word: str, known: tuple[Name, ...], what: str, piece: str, form: str) -> Name:
    for name in known:
        if name == word:
            return name
    raise ConfigError(f"chaos: {word!r} in {piece!r} is no {what}; write {form}.{did_you_mean(word, known)}")


def _whole(text: str, name: str, piece: str, *, least: int = 0, most: float = float("inf")) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        limits = f"of {least} or more" if most == float("inf") else f"from {least} to {most}"
        raise ConfigError(f"chaos: {name}={text} in {piece!r} is not possible; give a whole number {limits}.")
    return int(text)


def _number(text: str, name: str, piece: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        raise ConfigError(f"chaos: {name}={text} in {piece!r} is not possible; give a number such as 0.5.")
    return float(text)


def _plain(value: float) -> str:
    """Write a number without an exponent, and exactly."""
    return str(int(value)) if value == int(value) else format(Decimal(repr(value)), "f")
