#!/bin/sh
# A picture of an HTML report: docs/screenshot.sh REPORT.html OUT.png [WIDTH,HEIGHT [dark]]. Needs Chromium.
set -eu
page=$(realpath "$1") out=$(realpath "$2") size=${3:-1280,1500}
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
  echo 'screenshot: no Chromium found; on Debian: apt-get install chromium' >&2; exit 1; }
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
[ "${4:-light}" = dark ] && scheme=0 || scheme=1
"$browser" --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
  --disable-component-update --disable-sync --hide-scrollbars --user-data-dir="$profile" \
  --blink-settings=preferredColorScheme=$scheme --window-size="$size" --screenshot="$out" "file://$page" 2>/dev/null
