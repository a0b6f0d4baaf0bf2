"""The table of settings. Command options, environment variables and config.toml are derived from
it.

To add a setting, add a row here and the code that reads it. A row with a `flag` becomes an option
of `localllm serve`. Other commands list the settings that they take
(localllm/cli/setting_options.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Value = str | int | float | bool | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    `kind`: the type its text is parsed to. A number is finite and 0 or more.
    `default`: its value if the user chose no other; None means automatic.
    `choices`: the allowed values (empty: any of its kind).
    `many`: the value is a tuple of texts, given as a list or as one text with commas.
    `percent`: a number from 1 to 100, with or without a percent sign.
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
    Setting("model", str, None, "MODEL used when none is named"),
    Setting(
        "host",
        str,
        "localhost",
        "address to listen on; anything but loopback requires an API key",
        flag="--host",
    ),
    Setting("port", int, 11535, "port to listen on", flag="--port"),
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
        "key that clients must send (generated when the host is not loopback)",
        flag="--api-key",
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
        "other machines that requests may be handed on to by [[upstream]]: "
        "names, addresses or networks",
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
    Setting("pool_key", str, None, "key that the servers of the pool want"),
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
        loads=True,
    ),
    Setting(
        "kv_type",
        str,
        "auto",
        "element type of the KV cache; q8_0/q4_0: of keys and of values",
        flag="--kv-type",
        choices=("auto", "f16", "q8_0", "q8_0/q4_0", "q4_0"),
        loads=True,
    ),
    Setting(
        "draft",
        str,
        "auto",
        "drafting: auto, off, ngram, mtp (own heads), a trained drafter, or a draft MODEL",
        flag="--draft",
        loads=True,
    ),
    Setting(
        "lora",
        str,
        (),
        "LoRA adapter laid over the model: FILE, or FILE:SCALE",
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
        "build of llama.cpp to run, of `localllm setup --list` (automatic: the one chosen there)",
    ),
    Setting(
        "gpu_layers",
        str,
        "auto",
        "layers on the GPU, the output counted as one (default: as many as fit)",
        flag="--gpu-layers",
        metavar="N|all",
        loads=True,
    ),
    Setting(
        "cpu_moe",
        str,
        "auto",
        "layers whose experts stay in system memory, from the first (default: as needed)",
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
        "machine that shares the model: HOST:PORT of `localllm worker`; for MLX an SSH "
        "destination, or a hostfile of MLX",
        flag="--with",
        metavar="MACHINE",
        many=True,
    ),
    Setting(
        "gap_ms",
        float,
        20.0,
        "ms that a prompt read at the same time may add between two tokens on a GPU, "
        "or one step if that is longer",
    ),
    Setting(
        "power",
        float,
        100.0,
        "share of the time spent computing, in %; below 100 it rests after each step, which saves "
        "heat, noise and battery",
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
        "decode while others want them)",
        loads=True,
    ),
    Setting(
        "cache_ram_gb",
        float,
        None,
        "memory for cached prefixes in GB (automatic: a share of what is free)",
        loads=True,
    ),
    Setting("cache_disk_gb", float, 8.0, "disk space for cached prefixes in GB; 0 keeps none"),
    Setting(
        "cache_disk_daily_gb",
        float,
        64.0,
        "GB of cached prefixes written to disk in a day at most; 0 = no limit",
    ),
    Setting(
        "cache_disk_free_gb", float, 2.0, "GB of the disk that cached prefixes leave to others"
    ),
    Setting(
        "memory_headroom_gb",
        float,
        None,
        "memory left to other programs in GB (automatic: 5 % of it); 0 = no guard",
    ),
    Setting(
        "wired",
        bool,
        True,
        "keep the weights of a model that fills half the memory of a Mac or more in place (MLX)",
    ),
    Setting(
        "keep_awake", bool, True, "keep a desktop from idle sleep while requests run (macOS, Linux)"
    ),
    Setting(
        "only",
        bool,
        False,
        "serve the models that were named and their presets, and no other that is installed",
        flag="--only",
    ),
    Setting(
        "hang_min",
        float,
        5.0,
        "minutes without any sign of life after which a model's process that is at a request is "
        "replaced; 0 = never",
    ),
    Setting(
        "idle_unload_min",
        float,
        30.0,
        "minutes without a request after which a model is unloaded; 0 = never",
    ),
    Setting(
        "compaction",
        str,
        "ask",
        "a chat that outgrows the context: ask, or auto = leave out its oldest messages",
        choices=("ask", "auto"),
    ),
    Setting(
        "images",
        str,
        "auto",
        "images in prompts, if a projector lies beside the model; auto = if it fits",
        flag="--images",
        choices=("auto", "on", "off"),
    ),
    Setting(
        "allow_image_hosts",
        str,
        (),
        "host (name or name:port) that images may be fetched from by https",
        flag="--allow-image-hosts",
        metavar="NAME",
        many=True,
    ),
    Setting(
        "allow_pull",
        bool,
        False,
        "let clients of the server fetch and remove models (Ollama's pull and delete)",
        flag="--allow-pull",
    ),
    Setting(
        "max_connections", int, 512, "connections of requests that were let in at the same time"
    ),
    Setting(
        "max_unknown_connections",
        int,
        64,
        "connections without a key, from this machine and from outside each",
    ),
    Setting("idle_timeout_s", float, 60.0, "seconds that a connection may rest between requests"),
    Setting("idle_unknown_timeout_s", float, 5.0, "the same without a key"),
    Setting("header_timeout_s", float, 10.0, "seconds that a request's headers may take"),
    Setting(
        "body_timeout_s",
        float,
        10.0,
        "seconds that a request's body may take, besides its bytes at the least rate",
    ),
    Setting("min_body_bytes_s", int, 64_000, "least rate of a request's body, in bytes a second"),
    Setting("offline", bool, False, "never contact the hub", flag="--offline"),
)

# The settings that decide how one model is loaded.
LOADING = tuple(row.name for row in TABLE if row.loads)
