"""The table of settings. Command options, environment variables and config.toml are derived from
it.

To add a setting, add a row here and the code that reads it. A row with a `flag` becomes an option
of `localllm serve`. Other commands list the settings that they take
(localllm/cli/setting_options.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Value = str | int | float | bool | tuple[str, ...] | None


class Setting(NamedTuple):
    """One setting.

    `kind`: the type its text is parsed to. A number is finite and 0 or more.
    `default`: its value if the user chose no other; None means automatic.
    `choices`: the allowed values (empty: any of its kind).
    `many`: the value is a tuple of texts, given as a list or as one text with commas.
    `percent`: a number from 1 to 100, with or without a percent sign.
    `least`: the smallest allowed number except 0, which means automatic (None: no limit).
    `largest`: the largest allowed number (None: no limit).
    `flag`, `metavar`: its command-line option and the placeholder for the option's value.
    `loads`: it decides how one model is loaded, so a model's preset may override it.
    """

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    default: Value
    help: str
    flag: str = ""
    metavar: str = ""
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    many: bool = False
    percent: bool = False
    least: int | None = None
    largest: int | None = None
    loads: bool = False

    @property
    def env(self) -> str:
        """The name of its environment variable."""
        return "LOCALLLM_" + self.name.upper()

    @property
    def allowed(self) -> tuple[str, ...]:
        """The allowed values; () = anything of its kind."""
        if callable(self.choices):
            return self.choices()
        return self.choices


def _engines() -> tuple[str, ...]:
    from localllm_backends import registry

    return ("auto", *registry.backends())


TABLE: tuple[Setting, ...] = (
    Setting("model", str, None, "MODEL to use if no model is named"),
    Setting(
        "host",
        str,
        "localhost",
        "address to listen on; anything but loopback requires an API key",
        flag="--host",
    ),
    Setting("port", int, 11535, "port to listen on", flag="--port", largest=65_535),
    Setting(
        "unix_socket",
        str,
        None,
        "path of a Unix socket to listen on instead of a port; only this user can open it",
        flag="--unix",
        metavar="PATH",
    ),
    Setting(
        "api_key",
        str,
        None,
        "key that clients must send (generated if the host is not loopback)",
        flag="--api-key",
    ),
    Setting(
        "allow_users",
        bool,
        False,
        "answer every user of this machine without a key, not only the user of the server",
        flag="--allow-users",
    ),
    Setting(
        "allow_host",
        str,
        (),
        "another name of this server that clients may use in the Host header, such as nas.lan",
        flag="--allow-host",
        metavar="NAME",
        many=True,
    ),
    Setting(
        "allow_origin",
        str,
        (),
        "web page that may use the server, such as https://chat.example; "
        "* (with a key only) = every page",
        flag="--allow-origin",
        metavar="ORIGIN",
        many=True,
    ),
    Setting(
        "allow_upstream",
        str,
        (),
        "machines that [[upstream]] may forward requests to: names, addresses or networks",
        many=True,
    ),
    Setting(
        "pool",
        str,
        (),
        "another localllm server that this one forwards requests to, instead of loading a model",
        flag="--pool",
        metavar="URL",
        many=True,
    ),
    Setting("pool_key", str, None, "key that the servers of the pool require"),
    Setting(
        "kv_from",
        str,
        (),
        "another server of the same pool, from which the KV of system prompts is copied",
        flag="--kv-from",
        metavar="URL",
        many=True,
    ),
    Setting(
        "prefill_from",
        str,
        (),
        "another localllm server that reads long prompts for this one and sends their KV, if "
        "that is faster",
        flag="--prefill-from",
        metavar="URL",
        many=True,
    ),
    Setting(
        "prefill_key",
        str,
        None,
        "key that the servers of --prefill-from and --kv-from want; there it needs `kv = true`",
    ),
    Setting(
        "prefill_from_tokens",
        int,
        0,
        "uncached tokens from which a prompt is always read by --prefill-from; 0 = if that is "
        "expected to be faster",
    ),
    Setting(
        "allow_plain",
        bool,
        False,
        "send KV to other machines without encryption, and ask them for it",
        flag="--allow-plain",
    ),
    Setting(
        "tls_cert",
        str,
        None,
        "file with the server's certificate (PEM): the server then uses https",
        flag="--tls-cert",
        metavar="FILE",
    ),
    Setting(
        "tls_key",
        str,
        None,
        "file with the certificate's private key (default: in the certificate's file)",
        flag="--tls-key",
        metavar="FILE",
    ),
    Setting(
        "context",
        int,
        None,
        "context in tokens (default: what fits)",
        flag="--context",
        least=256,
        loads=True,
    ),
    Setting(
        "kv_type",
        str,
        "auto",
        "element type of the KV cache; q8_0/q4_0: q8_0 keys and q4_0 values; the types after q4_0 "
        "are only for MLX",
        flag="--kv-type",
        choices=(
            "auto",
            "f16",
            "q8_0",
            "q8_0/q4_0",
            "q4_0",
            "q6_0",
            "q5_0",
            "q3_0",
            "q2_0",
            "turbo4",
            "turbo3",
            "turbo2",
        ),
        loads=True,
    ),
    Setting(
        "draft",
        str,
        "auto",
        "drafting: auto, off, ngram, mtp (the model's "
        "MTP heads), a trained drafter, or a draft MODEL",
        flag="--draft",
        loads=True,
    ),
    Setting(
        "lora",
        str,
        (),
        "LoRA adapter to apply to the model: FILE, or FILE:SCALE",
        flag="--lora",
        metavar="FILE[:SCALE]",
        many=True,
        loads=True,
    ),
    Setting(
        "backend",
        str,
        "auto",
        "engine to run with: auto, llamacpp or mlx",
        flag="--backend",
        choices=_engines,
        loads=True,
    ),
    Setting(
        "build",
        str,
        None,
        "llama.cpp build to run, from `localllm setup --list` (automatic: the build chosen there)",
    ),
    Setting(
        "engine_releases",
        str,
        "https://api.github.com/repos/ggml-org/llama.cpp",
        "address of the API that lists llama.cpp's releases, such as a mirror of GitHub's",
    ),
    Setting(
        "gpu_layers",
        str,
        "auto",
        "layers on the GPU; the output counts as one layer (default: as many as fit)",
        flag="--gpu-layers",
        metavar="N|all",
        loads=True,
    ),
    Setting(
        "cpu_moe",
        str,
        "auto",
        "number of layers, from the first, whose experts "
        "stay in system memory (default: as needed)",
        flag="--cpu-moe",
        metavar="N|all",
        loads=True,
    ),
    Setting(
        "split",
        str,
        None,
        "each GPU's share of the layers, such as 3,1 (default: by their memory)",
        flag="--split",
        metavar="A,B",
        loads=True,
    ),
    Setting(
        "workers",
        str,
        (),
        "machine that runs a part of the model: HOST:PORT of `localllm worker`; for MLX an SSH "
        "destination or an MLX hostfile",
        flag="--with",
        metavar="MACHINE",
        many=True,
    ),
    Setting(
        "gap_ms",
        float,
        20.0,
        "ms that prefill of another prompt may add between two tokens on a GPU, or one step if "
        "that is longer",
    ),
    Setting(
        "power",
        float,
        100.0,
        "share of the time to compute, in %; below 100 the engine pauses after each step, which "
        "saves heat, noise and battery",
        flag="--power",
        metavar="N%",
        percent=True,
        loads=True,
    ),
    Setting(
        "parallel",
        int,
        8,
        "requests served at the same time; more wait in the queue",
        flag="--parallel",
        loads=True,
    ),
    Setting(
        "threads",
        int,
        None,
        "CPU threads (automatic: fast physical cores, within a container's quota; fewer for "
        "decode while other programs use the cores)",
        loads=True,
    ),
    Setting(
        "cache_ram_gb",
        float,
        None,
        "memory for cached prefixes in GB (automatic: a share of what is free)",
        loads=True,
    ),
    Setting(
        "cache_disk_gb", float, 8.0, "disk space for cached prefixes in GB; 0 = keep none on disk"
    ),
    Setting(
        "cache_disk_daily_gb",
        float,
        64.0,
        "most GB of cached prefixes to write to disk in a day; 0 = no limit",
    ),
    Setting("cache_disk_free_gb", float, 2.0, "GB of the disk that cached prefixes leave free"),
    Setting(
        "memory_headroom_gb",
        float,
        None,
        "memory to leave to other programs in GB (automatic: 5 % of it); 0 = no memory guard",
    ),
    Setting(
        "wired",
        bool,
        True,
        "wire the weights of a model that fills half of a Mac's memory or more (MLX)",
    ),
    Setting(
        "keep_awake",
        bool,
        True,
        "prevent idle sleep of a desktop while requests run (macOS, Linux)",
    ),
    Setting(
        "only",
        bool,
        False,
        "serve only the named models and their presets, not all installed models",
        flag="--only",
    ),
    Setting(
        "hang_min",
        float,
        5.0,
        "minutes without a sign of life after which a model's process that runs a request is "
        "restarted; 0 = never",
    ),
    Setting(
        "idle_unload_min",
        float,
        30.0,
        "minutes without a request after which a model is unloaded; 0 = never",
    ),
    Setting(
        "warm",
        str,
        None,
        "instructions to prefill in idle time after the start: last = those that each client sent "
        "last (they are kept on disk), or a file with a system prompt or a chat request",
        flag="--warm",
        metavar="FILE|last",
    ),
    Setting(
        "compaction",
        str,
        "ask",
        "if a chat outgrows the context: ask = ask what "
        "to do, auto = leave out its oldest messages",
        choices=("ask", "auto"),
    ),
    Setting(
        "images",
        str,
        "auto",
        "images and sounds in prompts (needs the model's projector file); auto = if it fits",
        flag="--images",
        choices=("auto", "on", "off"),
    ),
    Setting(
        "allow_image_hosts",
        str,
        (),
        "host (name or name:port) from which images may be fetched by https",
        flag="--allow-image-hosts",
        metavar="NAME",
        many=True,
    ),
    Setting(
        "allow_pull",
        bool,
        False,
        "allow clients to download and remove models (Ollama's pull and delete)",
        flag="--allow-pull",
    ),
    Setting(
        "chat_thinking",
        str,
        "folded",
        "how the chat shows the model's thinking at first",
        choices=("shown", "folded", "off"),
    ),
    Setting("chat_mouse", bool, True, "use the mouse in the full-screen chat"),
    Setting(
        "chat_screen_reader",
        bool,
        False,
        "chat for a screen reader: add lines only, without frames, with the terminal's own cursor",
        flag="--screen-reader",
    ),
    Setting("max_connections", int, 512, "connections with an accepted request, at the same time"),
    Setting(
        "max_unknown_connections",
        int,
        64,
        "connections without a key, for this machine and for other machines each",
    ),
    Setting(
        "idle_timeout_s", float, 60.0, "seconds that a connection may be idle between requests"
    ),
    Setting("idle_unknown_timeout_s", float, 5.0, "the same without a key"),
    Setting("header_timeout_s", float, 10.0, "seconds that a request's headers may take"),
    Setting(
        "body_timeout_s",
        float,
        10.0,
        "seconds that a request's body may take, in addition to its bytes at the lowest rate",
    ),
    Setting(
        "min_body_bytes_s", int, 64_000, "lowest rate of a request's body, in bytes per second"
    ),
    Setting(
        "measured_rows",
        str,
        None,
        "file or https:// address of speeds that others measured, for `catalog update`",
        flag="--measured-rows",
        metavar="PLACE",
    ),
    Setting("offline", bool, False, "never contact the hub", flag="--offline"),
)

# The settings that decide how one model is loaded.
LOADING = tuple(row.name for row in TABLE if row.loads)
