#!/bin/sh
# Create all files of a release in dist/: sdist, wheel, man pages and completions, the formula, and the SBOM.
# `release.sh [URL]`: the future download address of the sdist. PYTHON needs the tools of packaging/release-tools.txt.
set -eu

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-dist}
HOMEPAGE=${HOMEPAGE:-https://github.com/localllm/localllm}

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }

"$PYTHON" -c 'import build, cyclonedx_py, localllm' 2>/dev/null ||
	die "$PYTHON lacks what makes a release" "$PYTHON -m pip install -e . -r packaging/release-tools.txt"
VERSION=$("$PYTHON" -c 'import localllm; print(localllm.__version__)')
# If another project on the index owns the name, its wheel would replace ours, or ours would replace it.
NAME=$("$PYTHON" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["name"])')
if [ -z "${NAME_IS_OURS:-}" ] && "$PYTHON" -m pip --disable-pip-version-check index versions "$NAME" >/dev/null 2>&1; then
	die "the package index has a distribution $NAME" "set another name in pyproject.toml, or NAME_IS_OURS=1 if that one is ours"
fi
# The date of the newest commit, so that two builds of it are identical, byte for byte.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

rm -rf "$OUT"
say "sdist and wheel of $VERSION"
"$PYTHON" -m build --outdir "$OUT" .

say "man pages and completions"
"$PYTHON" packaging/generated.py "$OUT/generated" >/dev/null
tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -czf "$OUT/localllm-$VERSION-man-and-completions.tar.gz" -C "$OUT/generated" .
rm -r "$OUT/generated"

say "the formula"
SDIST="$OUT/localllm-$VERSION.tar.gz"
SHA256=$("$PYTHON" -c 'import hashlib, sys; print(hashlib.file_digest(open(sys.argv[1], "rb"), "sha256").hexdigest())' "$SDIST")
URL=${1:-$HOMEPAGE/releases/download/v$VERSION/localllm-$VERSION.tar.gz}
sed -e "s|@URL@|$URL|; s|@SHA256@|$SHA256|; s|@HOMEPAGE@|$HOMEPAGE|" packaging/homebrew/localllm.rb.in >"$OUT/localllm.rb"

# The packages in an environment with localllm alone: exactly its dependencies.
say "the SBOM, of a clean environment with the newest dependencies"
"$PYTHON" -m venv "$OUT/sbom-env"
"$OUT/sbom-env/bin/python" -m pip --disable-pip-version-check install --quiet "$OUT/localllm-$VERSION-py3-none-any.whl"
"$PYTHON" -m cyclonedx_py environment "$OUT/sbom-env/bin/python" --pyproject pyproject.toml \
	--output-reproducible --of JSON -o "$OUT/localllm-$VERSION.cdx.json"
"$OUT/sbom-env/bin/localllm" licences --models >"$OUT/localllm-$VERSION-licences.txt"
rm -r "$OUT/sbom-env"

"$PYTHON" - "$OUT" <<'PY'
import hashlib, pathlib, sys

out = pathlib.Path(sys.argv[1])
files = sorted(f for f in out.iterdir() if f.is_file() and f.name != "SHA256SUMS")
(out / "SHA256SUMS").write_text("".join(f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files))
PY
say "made in $OUT/"
ls "$OUT" >&2
