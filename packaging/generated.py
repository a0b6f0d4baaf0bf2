"""Write the files that packages ship in addition to the program: man pages, and completions for
bash, zsh and fish.

`python packaging/generated.py OUT` with the Python that localllm is installed for; OUT/man1,
OUT/bash, OUT/zsh, OUT/fish. The completions contain only words, so a Tab starts no Python.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.main import get_command

from localllm import __version__
from localllm.cli.all_commands import app

PROGRAM = "localllm"


@dataclass(frozen=True)
class Option:
    """One option: spellings, word for its value ("" for a switch), allowed values, and help."""

    names: tuple[str, ...]
    metavar: str
    values: tuple[str, ...]
    help: str


@dataclass(frozen=True)
class Command:
    """A command or group, identified by its words (`localllm models rm` has two)."""

    words: tuple[str, ...]
    summary: str
    text: str
    arguments: tuple[tuple[str, str], ...]
    options: tuple[Option, ...]
    commands: tuple[Command, ...] = field(default=())

    def all(self) -> Iterator[Command]:
        """Yield this command and all its subcommands."""
        yield self
        for command in self.commands:
            yield from command.all()


def read(group: Any, words: tuple[str, ...] = ()) -> Command:
    """Read the command line from typer, without hidden commands and options."""
    options, arguments = [], []
    context = group.make_context(PROGRAM, [], resilient_parsing=True)
    for parameter in group.get_params(context):
        shown = None if getattr(parameter, "hidden", False) else parameter.get_help_record(context)
        if shown is None:
            continue
        spelling, said = shown
        if not spelling.startswith("-"):
            arguments.append((re.sub(r" <.*>$", "", spelling), said))
            continue
        *names, last = re.split(r", | / ", spelling)
        name, _, metavar = last.partition(" ")
        metavar = re.sub(r"^<(int|float|str|path)>$", lambda kind: kind[1].upper(), metavar)
        # A metavar such as `[chat|coding]` lists all values. A metavar with placeholders such as
        # `N|all` does not.
        listed = metavar.strip("[]<>").split("|")
        values = (
            tuple(listed) if len(listed) > 1 and not any(word.isupper() for word in listed) else ()
        )
        options.append(Option((*names, name), metavar, values, said))
    below = sorted(getattr(group, "commands", {}).items())
    text = (group.help or "").strip()
    return Command(
        words, (group.short_help or text.partition(". ")[0].partition("\n")[0]).rstrip("."), text,
        tuple(arguments),
        tuple(options), tuple(read(command, (*words, name)) for name,
        command in below if not command.hidden),
    )  # fmt: skip


# --- man pages ------------------------------------------------------------------------------------


def roff(text: str) -> str:
    """Return `text` for roff, with escaped signs, hyphens that can be copied, and no line that is a
    request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(
        f"\\&{line}" if line[:1] in (".", "'") else line for line in escaped.split("\n")
    )


def today() -> str:
    """Return the date for the pages. SOURCE_DATE_EPOCH (seconds) makes builds reproducible."""
    return time.strftime(
        "%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()))
    )


def man_page(command: Command, epilog: str) -> str:
    """Return the man(7) page of one command."""
    name = "-".join((PROGRAM, *command.words))
    lines = [
        f'.TH "{roff(name.upper())}" 1 "{today()}" "localllm {__version__}" "localllm"',
        ".SH NAME", f"{roff(name)} \\- {roff(command.summary)}",
        ".SH SYNOPSIS", f".B {roff(' '.join((PROGRAM, *command.words)))}",
        roff(" ".join([*(["[OPTIONS]"] if command.options else []),
        *(a for a, _ in command.arguments)])
             + (" COMMAND" if command.commands else "")),
        ".SH DESCRIPTION", *roff(re.sub(r"\n\s*\n", "\n.PP\n", command.text)).replace("\\&.PP",
        ".PP").split("\n"),
    ]  # fmt: skip
    if any(said for _, said in command.arguments):
        lines.append(".SH ARGUMENTS")
        for metavar, said in command.arguments:
            lines += [".TP", f".I {roff(metavar)}", roff(said)]
    if command.options:
        lines.append(".SH OPTIONS")
        for option in command.options:
            shown = ", ".join(f"\\fB{roff(name)}\\fR" for name in option.names)
            lines += [
                ".TP",
                shown + (f" \\fI{roff(option.metavar)}\\fR" if option.metavar else ""),
                roff(option.help),
            ]
    if command.commands:
        lines.append(".SH COMMANDS")
        for sub in command.commands:
            lines += [".TP", f".B {roff(' '.join((PROGRAM, *sub.words)))}", roff(sub.summary)]
    if not command.words:
        lines += [".SH EXIT STATUS", roff(epilog.removeprefix("Exit codes: "))]
    others = (
        [PROGRAM] if command.words else ["-".join((PROGRAM, *c.words)) for c in command.commands]
    )
    lines += [
        ".SH SEE ALSO",
        ",\n".join(f".BR {roff(other)} (1)" for other in others).replace(",\n", " ,\n"),
    ]
    return "\n".join(line.rstrip() for line in lines if line.strip()) + "\n"


# --- completions ----------------------------------------------------------------------------------


def words_after(command: Command) -> list[str]:
    """Return the words that may follow `command`: its subcommands and its options."""
    return [c.words[-1] for c in command.commands] + [
        name for option in command.options for name in option.names
    ]


def bash(root: Command) -> str:
    """Return the completion for bash: words of the longest command that was typed, values of
    options, and files."""
    cases = "\n".join(
        f'        "{" ".join(c.words)}") words="{" ".join(words_after(c))}" ;;' for c in root.all()
    )
    groups = " ".join(f'"{" ".join(c.words)}"' for c in root.all() if c.words)
    values = {name: o.values for c in root.all() for o in c.options if o.values for name in o.names}
    listed = "\n".join(
        f'        {name}) COMPREPLY=($(compgen -W "{" ".join(v)}" -- "$cur")); return ;;'
        for name, v in values.items()
    )
    return f"""\
# bash completion for {PROGRAM}, made by packaging/generated.py
_{PROGRAM}() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" path="" words="" word known
    local -a all=({groups})
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        for known in "${{all[@]}}"; do
            if [[ "$known" == "${{path:+$path }}$word" ]]; then path="$known"; break; fi
        done
    done
    case "$prev" in
{listed}
    esac
    case "$path" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ "$cur" != -* ]]; then COMPREPLY+=($(compgen -f -- "$cur")); fi
}}
complete -o filenames -F _{PROGRAM} {PROGRAM}
"""


def zsh(root: Command) -> str:
    """Return the completion for zsh: the same words as for bash, each with its help."""

    def said(name: str, text: str) -> str:
        return "'" + f"{name}:{text}".replace("'", "'\\''").replace("\n", " ") + "'"

    def words(command: Command) -> str:
        options = [said(name, option.help) for option in command.options for name in option.names]
        return " ".join([*(said(sub.words[-1], sub.summary) for sub in command.commands), *options])

    cases = "\n".join(f'    "{" ".join(c.words)}") words_=({words(c)}) ;;' for c in root.all())
    groups = " ".join(f'"{" ".join(c.words)}"' for c in root.all() if c.words)
    return f"""\
#compdef {PROGRAM}
# zsh completion for {PROGRAM}, made by packaging/generated.py
_{PROGRAM}() {{
  local path_="" word known
  local -a words_ all
  all=({groups})
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    for known in "${{all[@]}}"; do
      if [[ "$known" == "${{path_:+$path_ }}$word" ]]; then path_="$known"; break; fi
    done
  done
  case "$path_" in
{cases}
  esac
  _describe '{PROGRAM}' words_
  [[ "${{words[CURRENT]}}" == -* ]] || _files
}}
_{PROGRAM} "$@"
"""


def fish(root: Command) -> str:
    """Return the completion for fish, with one line for each word."""

    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", " ") + "'"

    lines = [f"# fish completion for {PROGRAM}, made by packaging/generated.py"]
    for command in root.all():
        typed = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
        below = " ".join(c.words[-1] for c in command.commands)
        condition = typed or "__fish_use_subcommand"
        for sub in command.commands:
            fresh = f"{typed}; and not __fish_seen_subcommand_from {below}" if typed else condition
            lines.append(
                f"complete -c {PROGRAM} -f -n {quoted(fresh)} -a {sub.words[-1]} -d "
                f"{quoted(sub.summary)}"
            )
        for option in command.options:
            spelled = " ".join(
                f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names
            )
            takes = (
                f" -x -a {quoted(' '.join(option.values))}"
                if option.values
                else " -r"
                if option.metavar
                else ""
            )
            lines.append(
                f"complete -c {PROGRAM} -n {quoted(condition)} {spelled}{takes} -d "
                f"{quoted(option.help)}"
            )
    return "\n".join(lines) + "\n"


def write(out: Path) -> list[Path]:
    """Write all files to `out` and return their paths."""
    root = read(get_command(app))
    texts = {
        out / "man1" / f"{'-'.join((PROGRAM, *c.words))}.1": man_page(c, app.info.epilog or "")
        for c in root.all()
    }
    texts |= {
        out / "bash" / PROGRAM: bash(root),
        out / "zsh" / f"_{PROGRAM}": zsh(root),
        out / "fish" / f"{PROGRAM}.fish": fish(root),
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return [*texts]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python packaging/generated.py OUT")
    for path in write(Path(sys.argv[1])):
        print(path)
