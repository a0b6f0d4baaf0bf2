"""`localllm service`: run the server for this user with systemd, launchd or Task Scheduler."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from localllm.cli.commands.shared import Json, print_json
from localllm.cli.setting_options import with_setting_options
from localllm.errors import UsageError
from localllm.plain_output import print_lines
from localllm.settings import Settings

app = typer.Typer(help="Run `localllm serve` at login and after a crash.", no_args_is_help=True)

ManagerName = Annotated[
    str | None,
    typer.Option(
        "--manager",
        metavar="NAME",
        help="systemd, launchd or task-scheduler, if not this system's.",
    ),
]


@app.command()
@with_setting_options("unix_socket")
def install(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Models to serve.")
    ] = None,
    *,
    settings: Settings,
    memory_gb: Annotated[float | None, typer.Option(help="Memory limit (systemd only).")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files, and write nothing.")
    ] = False,
    manager: ManagerName = None,
) -> None:
    """Start the server now and at each login. Run it again to change something.

    Settings come from config.toml (`localllm config`), as for `localllm serve`.
    """
    from localllm.cli.serve.listening import listening, server_settings
    from localllm.cli.serve.model_router import router_of
    from localllm.cli.service_unit import (
        manager_named,
        service_of,
        settings_of_this_terminal,
        wait_until_it_listens,
    )

    kind = manager_named(manager)
    service = service_of(models or [], settings, kind.name, memory_gb)
    if dry_run:
        for path, text in kind.files(service).items():
            if path.suffix in (".plist", ".xml"):
                print(f"<!-- {path} -->\n{text}")
            else:
                print(f"# {path}\n{text}")
        return
    # Report errors that would end the server at its start here, not in its log.
    router_of(models or [], (), settings)
    if not kind.state().running:
        # If a port is in use, the manager would only report that the server failed.
        with listening(server_settings(settings)):
            pass
    if shell_only := settings_of_this_terminal():
        print(
            f"set only in this shell, so not for the service: {', '.join(shell_only)} "
            "(`localllm config set` stores a setting)",
            file=sys.stderr,
        )
    started_s = time.time()
    for path in kind.install(service):
        print(f"wrote {path}", file=sys.stderr)
    print(f"serving on {wait_until_it_listens(started_s)}, now and at each login", file=sys.stderr)
    if kind.name == "systemd":
        print(
            "to start at boot, and stay when you log out: sudo loginctl enable-linger $USER",
            file=sys.stderr,
        )


@app.command()
def status(as_json: Json = False, manager: ManagerName = None) -> None:
    """Show whether it runs. Exit code 3: not installed, 6: installed but not running."""

    from localllm.cli.serve.running import running_servers
    from localllm.cli.service_unit import manager_named, state_lines

    state = manager_named(manager).state()
    address = next(
        (server.address for server in running_servers() if server.pid == state.pid), None
    )
    if as_json:
        print_json({**asdict(state), "address": address})
    else:
        print_lines(state_lines(state, address))
    if state.running:
        return
    if state.installed:
        raise typer.Exit(6)
    raise typer.Exit(3)


@app.command()
def logs(
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of lines to show, from the end.")
    ] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until Ctrl-C.")
    ] = False,
    manager: ManagerName = None,
) -> None:
    """Show the server's log: starts, models and errors. It never contains prompts."""
    from localllm.cli.service_unit import manager_named, show_log

    show_log(manager_named(manager).log_command(lines, follow))


@app.command()
def restart(manager: ManagerName = None) -> None:
    """Restart the server, for example after an upgrade. With systemd, new requests wait
    meanwhile."""
    from localllm.cli.service_unit import manager_named, wait_until_it_listens

    kind = manager_named(manager)
    if not kind.state().installed:
        raise UsageError("the service is not installed", hint="`localllm service install`")
    started_s = time.time()
    kind.restart()
    print(f"serving on {wait_until_it_listens(started_s)}", file=sys.stderr)


@app.command()
def stop(manager: ManagerName = None) -> None:
    """Stop the server until the next login or `service restart`. The service stays installed."""
    from localllm.cli.service_unit import manager_named

    kind = manager_named(manager)
    if not kind.state().installed:
        raise UsageError("the service is not installed", hint="`localllm service install`")
    kind.stop()
    print("stopped; `localllm service restart` starts it again", file=sys.stderr)


@app.command()
def uninstall(manager: ManagerName = None) -> None:
    """Stop the server and remove the service. Models, chats and settings stay."""
    from localllm.cli.service_unit import manager_named

    removed = manager_named(manager).uninstall()
    for path in removed:
        print(f"removed {path}", file=sys.stderr)
    if not removed:
        print("there was no service", file=sys.stderr)


@app.command(hidden=True)
def run(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...")] = None,
    log: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write to this file instead of the terminal.")
    ] = None,
    variable: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Environment.")
    ] = None,
    # The settings are read after the environment is set.
    unix: Annotated[str | None, typer.Option(metavar="PATH")] = None,
) -> None:
    """Run `localllm serve` with environment variables and a log file.

    It is for a manager that provides neither (Task Scheduler).
    """

    from localllm.cli.commands.serve import serve
    from localllm.cli.service_unit import redirect_output

    for pair in variable or []:
        name, _, value = pair.partition("=")
        os.environ[name] = value
    if log is not None:
        redirect_output(log)
    serve(models, unix_socket=unix)


@app.command(hidden=True)
def settle() -> None:
    """Wait until the workers have saved their data. systemd runs this after the server has
    ended."""
    from localllm.cli.service_unit import wait_for_workers

    if n_killed := wait_for_workers():
        print(
            f"{n_killed} workers of the ended server did not exit, so they were killed",
            file=sys.stderr,
        )
