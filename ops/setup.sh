#!/bin/sh
# Make .venv and install into it the exact set that was tested: `ops/setup.sh all` to run, `ops/setup.sh dev` to develop too.
# Instant when nothing changed. PYTHON names the interpreter to build on; else the first that fits, the one it was tested on before others.
set -eu
cd "$(dirname "$0")/.."

extra=$1
venv=.venv
key=$(cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

for installed in "$extra" dev; do  # dev holds all
    if [ -e "$venv/.installed-$installed-$key" ]; then exit 0; fi
done

if ! { "$venv/bin/python" -c "$fits" && "$venv/bin/python" -m pip --version; } >/dev/null 2>&1; then
    rm -rf "$venv"  # absent, half made, or its interpreter has gone
    base='' lacking=''
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if ! "$candidate" -c "$fits" >/dev/null 2>&1; then continue; fi
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then base=$candidate; break; fi
        lacking=$candidate
    done
    if [ -z "$base" ] && [ -n "$lacking" ]; then
        echo "$lacking cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv" >&2
        exit 1
    elif [ -z "$base" ]; then
        echo "Python 3.11, 3.12 or 3.13 is needed and none was found. On Debian or Ubuntu: apt-get install python3 python3-venv" >&2
        echo "If it is installed elsewhere, say where: make PYTHON=/path/to/python3.11 ..." >&2
        exit 1
    fi
    echo "Making $venv with $("$base" --version)"
    "$base" -m venv "$venv"
fi

# Everything pip says is in the log; the screen gets what takes long.
echo "Installing nexus-bus[$extra] (minutes the first time; details in $venv/install.log)"
status=$(mktemp)
{ "$venv/bin/python" -m pip install --disable-pip-version-check -c constraints.txt -e ".[$extra]" 2>&1 || echo failed >"$status"; } |
    tee "$venv/install.log" | while read -r line; do
    case $line in
        *Downloading*[0-9][0-9].[0-9]" MB"*) echo "  ${line#*Downloading }" ;;
        "Installing collected packages"*) echo "  unpacking" ;;
    esac
done
if [ -s "$status" ]; then
    rm -f "$status"
    tail -n 25 "$venv/install.log" >&2
    exit 1
fi
rm -f "$status" "$venv"/.installed-*
touch "$venv/.installed-$extra-$key"
