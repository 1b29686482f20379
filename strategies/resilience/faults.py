"""Chaos: the faults to inject into a run, and when."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from decimal import Decimal
from typing import Final, Literal, TypeVar, get_args

from ...common.errors import ConfigError, did_you_mean

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
_DRAWN: Final = "kill/stop"  # the default kinds of random faults
_EVENT: Final = "'ACTION:rank=R@step=N', such as 'kill:rank=1@step=50'"
_RANDOM: Final = "'random:seed=S@seconds=A-B', such as 'random:seed=3@seconds=5-10'"


@dataclass(frozen=True)
class FaultEvent:
    """One fault: an action on a target at a point of the run."""

    action: Action
    target: Target
    index: int
    """The rank or the node, as numbered in the round that reaches the point."""
    point: Point
    number: int
    code: int = 1
    ms: float = 100.0
    delay: float = 0.0

    def __str__(self) -> str:
        """Return the text that `Chaos` parses as this event."""
        values = {"code": (self.code, 1), "ms": (self.ms, 100.0), "delay": (self.delay, 0.0)}
        options = [f"+{name}={_format_number(value)}" for name, (value, default) in values.items() if value != default]
        return f"{self.action}:{self.target}={self.index}{''.join(options)}@{self.point}={self.number}"


@dataclass(frozen=True)
class RandomFaults:
    """An endless series of faults with random times, ranks and kinds; all ranks draw the same ones."""

    seed: int
    shortest: float
    longest: float
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        """Return the text that `Chaos` parses as these faults."""
        actions = "/".join(self.actions)
        option = "" if actions == _DRAWN else f"+actions={actions}"
        return f"random:seed={self.seed}{option}@seconds={_format_number(self.shortest)}-{_format_number(self.longest)}"

    def draw(self, number: int, world_size: int) -> tuple[float, Action, int]:
        """Return the seconds from the previous fault or restart to this one, its action, and its rank."""
        generator = random.Random(f"{self.seed}/{number}")
        seconds = generator.uniform(self.shortest, self.longest)
        return seconds, generator.choice(self.actions), int(generator.random() * world_size)


@dataclass(frozen=True)
class Chaos:
    """The faults to inject into a run, parsed from a text: ``Chaos("kill:rank=1@step=50, leave:node=1@step=120")``.

    Events are separated by commas or spaces. Each is ``ACTION:TARGET@POINT``, with options after the target:
    ``exit:rank=0+code=3@step=7``. Each happens once in a run, even if its point is passed again after a restart; two
    equal events happen at the first and the second pass. An event whose target does not reach its point never happens.

    ============================== ===================================================================================
    ``kill``                       send SIGKILL to the process
    ``stop``                       send SIGSTOP to the process, which then stays alive and does nothing
    ``exit+code=1``                the process exits at once, with that code
    ``raise``                      a RuntimeError in the step
    ``hang``                       the process sleeps forever, where it is
    ``slow+ms=100``                the process sleeps that long before each of its steps from then on, until it ends
    ``leave``                      the node's agent is told to leave the run
    ``lose``                       the node's agent is killed, with its workers: a node lost without notice
    ``:rank=R``                    that worker, or its node
    ``:node=N``                    that node, or its first worker; for ``kill`` and ``stop``, all its workers
    ``@step=N``                    before the forward of the first micro-batch of step N: N - 1 steps are complete
    ``@start=R``                   when round R starts: its workers are connected, nothing is loaded; the first is 0
    ``@validation=N``              when this process begins its N-th validation, not counting the sanity check
    ``@checkpoint=N``              when this process begins to collect the state for its N-th checkpoint
    ``@snapshot=N``                when this process begins to collect the state for its N-th snapshot in memory
    ``+delay=0.5``                 that many seconds after the point, wherever the process is then (``kill``, ``stop``,
                                   ``exit``, ``leave`` and ``lose``)
    ============================== ===================================================================================

    A rank without samples in step N does not reach that point. ``random:seed=3@seconds=5-10`` injects a fault every 5
    to 10 seconds of training, at the next step, on any rank; ``+actions=kill/hang`` sets the kinds, by default
    ``kill/stop``.

    Raises:
        ConfigError: if the text is malformed.

    Example::

        Trainer(strategy=ElasticStrategy("ddp", chaos="kill:rank=1@step=50"), devices=2)
    """

    text: InitVar[str] = ""
    events: tuple[FaultEvent, ...] = field(init=False)
    at_random: RandomFaults | None = field(init=False)

    def __post_init__(self, text: str) -> None:
        entries = [entry for entry in re.split(r"[,\s]+", text) if entry]
        at_random = [entry for entry in entries if entry.startswith("random")]
        if len(at_random) > 1:
            raise ConfigError(f"chaos must have one random entry, got {' and '.join(map(repr, at_random))}; keep one.")
        object.__setattr__(self, "events", tuple(_parse_event(entry) for entry in entries if entry not in at_random))
        object.__setattr__(self, "at_random", _random_faults(at_random[0]) if at_random else None)

    @classmethod
    def random(
        cls, seed: int, every: tuple[float, float] = (5.0, 10.0), actions: Iterable[str] = ("kill", "stop")
    ) -> Chaos:
        """Return faults at random times; `every` holds the shortest and the longest time between two, in seconds.

        Raises:
            ConfigError: if a number or an action is invalid.
        """
        return cls(
            f"random:seed={seed}+actions={'/'.join(actions)}@seconds={_format_number(every[0])}-{_format_number(every[1])}"
        )

    def __bool__(self) -> bool:
        """Return whether there are any faults."""
        return bool(self.events) or self.at_random is not None

    def __str__(self) -> str:
        """Return the text that `Chaos` parses as these faults."""
        at_random = () if self.at_random is None else (self.at_random,)
        return ", ".join(map(str, (*self.events, *at_random)))


# --- reading ---------------------------------------------------------------------------------------------------------


def _parse_event(entry: str) -> FaultEvent:
    what, _, when = entry.partition("@")
    action_name, _, rest = what.partition(":")
    target_text, *option_texts = rest.split("+")
    action = _one_of(action_name, ACTIONS, "action", entry, _EVENT)
    target_name, index = _parse_pair(target_text, "target", entry, _EVENT)
    point_name, number = _parse_pair(when, "point", entry, _EVENT)
    target = _one_of(target_name, TARGETS, "target", entry, _EVENT)
    point = _one_of(point_name, POINTS, "point", entry, _EVENT)
    options = dict(_parse_pair(text, "option", entry, _EVENT) for text in option_texts)
    for name in options:
        if not _OPTIONS[action]:
            raise ConfigError(f"chaos: {name!r} in {entry!r}: {action} has no options; leave it out.")
        _one_of(name, _OPTIONS[action], f"option of {action}", entry, _EVENT)
    return FaultEvent(
        action,
        target,
        _parse_whole_number(index, target, entry),
        point,
        _parse_whole_number(number, point, entry, least=0 if point == "start" else 1),
        code=_parse_whole_number(options.get("code", "1"), "code", entry, most=255),
        ms=_parse_number(options.get("ms", "100"), "ms", entry),
        delay=_parse_number(options.get("delay", "0"), "delay", entry),
    )


def _random_faults(entry: str) -> RandomFaults:
    what, _, when = entry.partition("@")
    action_name, _, rest = what.partition(":")
    texts = dict(_parse_pair(text, "option", entry, _RANDOM) for text in filter(None, rest.split("+")))
    point_name, seconds = _parse_pair(when, "point", entry, _RANDOM)
    _one_of(action_name, ("random",), "action", entry, _RANDOM)
    _one_of(point_name, ("seconds",), "point", entry, _RANDOM)
    for name in texts:
        _one_of(name, ("seed", "actions"), "option", entry, _RANDOM)
    if "seed" not in texts:
        raise ConfigError(f"chaos: {entry!r} has no seed; write {_RANDOM}.")
    shortest, _, longest = seconds.partition("-")
    faults = RandomFaults(
        _parse_whole_number(texts["seed"], "seed", entry),
        _parse_number(shortest, "seconds", entry),
        _parse_number(longest or shortest, "seconds", entry),
        tuple(
            _one_of(name, ACTIONS, "action", entry, _RANDOM) for name in texts.get("actions", "kill/stop").split("/")
        ),
    )
    if faults.longest < faults.shortest:
        raise ConfigError(f"chaos: seconds in {entry!r} must increase, got {seconds}; write {longest}-{shortest}.")
    return faults


def _parse_pair(text: str, what: str, entry: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        fault = f"{text!r} in {entry!r} is not a valid {what}" if text else f"{entry!r} has no {what}"
        raise ConfigError(f"chaos: {fault}; write {form}.")
    return name, value


def _one_of(word: str, known: tuple[Name, ...], what: str, entry: str, form: str) -> Name:
    for name in known:
        if name == word:
            return name
    raise ConfigError(f"chaos: {word!r} in {entry!r} is not a valid {what}; write {form}.{did_you_mean(word, known)}")


def _parse_whole_number(text: str, name: str, entry: str, *, least: int = 0, most: float = float("inf")) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        limits = f">= {least}" if most == float("inf") else f"from {least} to {most}"
        raise ConfigError(f"chaos: {name} in {entry!r} must be a whole number {limits}, got {text}.")
    return int(text)


def _parse_number(text: str, name: str, entry: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        raise ConfigError(f"chaos: {name} in {entry!r} must be a number such as 0.5, got {text}.")
    return float(text)


def _format_number(value: float) -> str:
    """Return a number as exact text, without an exponent."""
    return str(int(value)) if value == int(value) else format(Decimal(repr(value)), "f")
