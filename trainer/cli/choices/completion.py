"""The command ``echelon completion``: a script that lets a shell complete commands, options and config keys."""

from __future__ import annotations

import argparse
from typing import Final

from ....common.errors import ConfigError
from .config_keys import KEYS, setting_names

_EPILOG = """\
examples:
  source <(echelon completion bash)          # now, or in ~/.bashrc
  source <(echelon completion zsh)           # in ~/.zshrc, after compinit
  echelon completion fish > ~/.config/fish/completions/echelon.fish

exit codes:
  0 done   2 no such shell
"""

_BASH: Final = """\
_echelon() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "$command" in
            {experiments}) words="{keys} {options}" ;;
            *) words="" ;;
        esac
    fi
    # a key of a config wants its value at once
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    case "${{COMPREPLY[0]}}" in *=|*.) compopt -o nospace ;; esac
    if [ "${{#COMPREPLY[@]}}" -eq 0 ]; then COMPREPLY=($(compgen -f -- "$word")); fi
}}
COMP_WORDBREAKS=${{COMP_WORDBREAKS//=}}
complete -o filenames -F _echelon echelon
"""

_ZSH: Final = "autoload -U +X bashcompinit && bashcompinit\n"

_FISH: Final = """\
complete -c echelon -n __fish_use_subcommand -f -a "{commands}"
complete -c echelon -n "__fish_seen_subcommand_from {spaced}" -a "{keys} {options}"
"""

_PLAIN: Final = ("seed", "ckpt_path", "optimizer_settings")
_EXPERIMENTS: Final = ("fit", "validate", "test", "predict")
_OPTIONS: Final = ("--help", "--help-for", "--print-config", "--traceback", "--output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.epilog = _EPILOG
    parser.add_argument("shell", help="bash, zsh or fish")


def run(options: argparse.Namespace) -> int:
    """Print the script; return 0."""
    from ..main import COMMANDS  # main imports this file

    scripts = {"bash": _BASH, "zsh": _ZSH + _BASH, "fish": _FISH}
    if options.shell not in scripts:
        raise ConfigError(f"There is no completion for {options.shell!r}; choose one of {', '.join(scripts)}.")
    settings = [f"trainer.{setting}=" for setting in setting_names()]
    sections = [f"{key}=" if key in _PLAIN else f"{key}." for key in KEYS]
    words = {
        "commands": " ".join(COMMANDS),
        "experiments": "|".join(_EXPERIMENTS),
        "spaced": " ".join(_EXPERIMENTS),
        "keys": " ".join([*settings, *sections, "ckpt_path=last", "ckpt_path=best", "optimizer_settings=configured"]),
        "options": " ".join(_OPTIONS),
    }
    print(scripts[options.shell].format(**words), end="")
    return 0
