"""`localllm serve`: the OpenAI-compatible endpoint."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli.commands.shared import CpuMoe, GpuLayers, Lora, Power, Split, installed_names

if TYPE_CHECKING:
    import asyncio


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            autocompletion=installed_names,
            help="What to serve: several share the machine, or take turns.",
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
            help="Another name that clients may use; `claude-*` is many (repeatable).",
        ),
    ] = None,
    only: Annotated[
        bool | None,
        typer.Option(
            "--only", help="Serve no installed model but those named (and their presets)."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (default localhost).")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default 11535).")] = None,
    unix: Annotated[
        str | None,
        typer.Option("--unix", metavar="PATH", help="Listen on a Unix socket instead of a port."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that clients must send.")] = None,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Replace the made-up key kept from earlier.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another name of this server (repeatable)."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="A web page that may use it (repeatable)."),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="Serve https with this certificate.")
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="The certificate's private key.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Served context in tokens (default: what fits).")
    ] = None,
    kv_type: Annotated[
        str | None, typer.Option(help="KV cache: auto, f16, q8_0, q8_0/q4_0 (keys/values) or q4_0.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Drafting: auto, off, ngram, mtp or a MODEL.")
    ] = None,
    lora: Lora = None,
    backend: Annotated[str | None, typer.Option(help="Engine: auto, llamacpp or mlx.")] = None,
    gpu_layers: GpuLayers = None,
    cpu_moe: CpuMoe = None,
    split: Split = None,
    power: Power = None,
    parallel: Annotated[
        int | None, typer.Option(help="Requests served at once (default 8).")
    ] = None,
    workers: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="MACHINE",
            help="Share the model with it (repeatable): HOST:PORT of a `localllm worker`; for MLX, "
            "as ssh calls it.",
        ),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Be the front of other servers of ours (repeatable), and load no model.",
        ),
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="Images in prompts: auto (if the projector fits), on or off.")
    ] = None,
    allow_image_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-image-hosts",
            metavar="NAME",
            help="Fetch images from that host too (repeatable).",
        ),
    ] = None,
    allow_pull: Annotated[
        bool | None,
        typer.Option(
            "--allow-pull", help="Let clients fetch and remove models (Ollama's pull and delete)."
        ),
    ] = None,
    offline: Annotated[
        bool | None, typer.Option("--offline", help="Never contact the hub.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print nothing but errors: no line per request either.")
    ] = False,
) -> None:
    """Serve an OpenAI-compatible endpoint on this machine (loopback only unless --host says
    otherwise).

    The MODELs are loaded now; any other that is installed when a request names it. They share the
    machine when they fit together; else the longest unused one makes room.
    """
    import asyncio

    from localllm.engine.worker.pipe import end_ahead, start_ahead

    flags = {
        "host": host,
        "port": port,
        "unix_socket": unix,
        "api_key": api_key,
        "context": context,
        "kv_type": kv_type,
        "gpu_layers": gpu_layers,
        "cpu_moe": cpu_moe,
        "split": split,
        "power": power,
        "draft": draft,
        "lora": lora,
        "backend": backend,
        "parallel": parallel,
        "images": images,
        "allow_pull": allow_pull,
        "offline": offline,
        "only": only,
        "allow_host": allow_host,
        "allow_origin": allow_origin,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "allow_image_hosts": list(
            chain.from_iterable(sent.split(",") for sent in allow_image_hosts or [])
        ),
        "pool": pool,
        "workers": workers,
    }
    with asyncio.Runner() as runner, suppress(asyncio.CancelledError):
        # It reads its code while we read ours.
        runner.run(start_ahead())
        try:
            _serve(
                runner, flags, models or [], also or [], alias or [], new_key=new_key, quiet=quiet
            )
        finally:
            runner.run(end_ahead())


def _serve(
    runner: asyncio.Runner,
    flags: dict[str, Any],
    models: list[str],
    also: list[str],
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
    from localllm.library import names
    from localllm.settings import Settings

    named = [*models, *also]
    names.check_said(*named)
    settings = Settings(flags)
    secured = server_settings(settings, new_key=new_key)
    if settings.value("pool"):
        from localllm.cli.serve.pool import serve_pool

        runner.run(serve_pool(settings, secured, [*named, *aliases], quiet=quiet))
        return
    # The port is taken before anything loads: a minute of loading must not end in "address in use".
    with listening(secured) as (socks, address), published(secured, port_of(socks)):
        router = router_of(named, aliases, settings)
        idle_s = 60.0 * settings.value("idle_unload_min")
        store = None
        if settings.value("allow_pull"):
            store = LibraryStore(settings.value("offline"))
        serving = serve_until_stopped(
            router, secured, socks, address, store=store, idle_s=idle_s, quiet=quiet
        )
        runner.run(serving)
