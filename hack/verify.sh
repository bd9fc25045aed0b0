#!/usr/bin/env bash
# Fails when something that is generated differs from what is committed, and says what. It generates in a copy, so that it
# changes nothing here.
set -euo pipefail
cd "$(dirname "$0")/.."

failed=0
complain() { printf 'verify: %s\n' "$*" >&2; failed=1; }

unformatted=$(git ls-files -co --exclude-standard '*.go' | while read -r f; do [ -f "$f" ] && gofmt -l "$f"; done || true)
[ -z "$unformatted" ] || complain "gofmt would change: $(echo $unformatted)"

go mod tidy -diff >/tmp/verify.$$ 2>&1 || { cat /tmp/verify.$$ >&2; complain "go.mod is stale: run go mod tidy"; }
rm -f /tmp/verify.$$

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -co --exclude-standard -z | while IFS= read -r -d '' f; do [ -e "$f" ] && printf '%s\0' "$f"; done |
	tar --null -T - -cf - | tar -xf - -C "$copy"
mkdir -p "$copy/bin" && ln -s "$PWD/bin/tools" "$copy/bin/tools"
make -C "$copy" -s generate TOOLS="$PWD/bin/tools" >/dev/null
if ! diff -rq --exclude bin . "$copy" --exclude .git --exclude out --exclude .cache >/dev/null; then
	diff -r --exclude bin --exclude .git --exclude out --exclude .cache -u . "$copy" | head -60 >&2 || true
	complain "generated files are stale: run make generate"
fi
[ "$failed" = 0 ] && echo "verify: everything that is generated is up to date"
exit "$failed"
