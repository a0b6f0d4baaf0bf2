"""`localllm serve`: the OpenAI-compatible endpoint."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.commands.shared import installed_names
from localllm.cli.setting_options import with_flags, with_setting_options
from localllm.settings import Settings

if TYPE_CHECKING:
    import asyncio


@with_setting_options(*with_flags())
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            autocompletion=installed_names,
            help="Models to serve: several share the memory, or are loaded in turns.",
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="One more model, for example for autocomplete."),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=MODEL]",
            help="Another name that clients may use; `claude-*` matches many (repeatable).",
        ),
    ] = None,
    *,
    settings: Settings,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Replace the stored generated key with a new one.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print only errors, no line per request.")
    ] = False,
) -> None:
    """Serve an OpenAI-compatible endpoint on this machine (only on loopback unless --host is
    given).

    The MODELs are loaded now. Other installed models are loaded when a request names them. Models
    stay loaded together if they fit. Otherwise the least recently used one is unloaded.
    """
    import asyncio

    from localllm.cli.serve.first_worker import worker_started
    from localllm.cli.serve.name_checks import check_names
    from localllm.library import names

    named = [*(models or ()), *(also or ())]
    names.check_not_empty(*named)
    if not settings.value("pool"):  # A pool's names are those of its servers.
        check_names(named, alias or ())
    with worker_started() as runner, suppress(asyncio.CancelledError):
        _serve(runner, settings, named, alias or [], new_key=new_key, quiet=quiet)


def _serve(
    runner: asyncio.Runner,
    settings: Settings,
    named: list[str],
    aliases: list[str],
    *,
    new_key: bool,
    quiet: bool,
) -> None:
    from localllm.cli.serve.installed_models import LibraryStore
    from localllm.cli.serve.listening import listening, port_of, server_settings
    from localllm.cli.serve.model_router import router_of
    from localllm.cli.serve.run import serve_until_stopped
    from localllm.cli.serve.running import published
    from localllm.cli.serve.upstreams import check_prefill_servers

    check_prefill_servers(settings)
    server_settings_used = server_settings(settings, new_key=new_key)
    if settings.value("pool"):
        from localllm.cli.serve.pool import serve_pool

        runner.run(serve_pool(settings, server_settings_used, [*named, *aliases], quiet=quiet))
        return
    # Bind the port before loading: a long load must not end in "address in use".
    with (
        listening(server_settings_used) as (socks, address),
        published(server_settings_used, port_of(socks)),
    ):
        router = router_of(named, aliases, settings)
        idle_s = 60.0 * settings.value("idle_unload_min")
        store = None
        if settings.value("allow_pull"):
            store = LibraryStore(settings.value("offline"))
        serving = serve_until_stopped(
            router,
            server_settings_used,
            socks,
            address,
            store=store,
            idle_s=idle_s,
            warm=settings.value("warm"),
            quiet=quiet,
        )
        runner.run(serving)
