# Makes the environment that tools/quickstart and tools/test run in. Sourced, not run.
#
#   TIERMEM_PYTHON    the Python to use (default: python3.11, else any python3 from 3.10 on)
#   TIERMEM_VENV      the environment's directory (default: .venv in the repository)
#   TIERMEM_PIP_ARGS  more arguments for pip, for instance an index with the CPU-only torch
#
# Two stamps in the environment make a second run start at once: `deps-<extra>` is the hash of what
# decides the packages, `native` the hash of what decides the native core. Only what changed is redone.

ROOT="${TIERMEM_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}"
VENV="${TIERMEM_VENV:-$ROOT/.venv}"
STAMPS="$VENV/tiermem-stamps"

say() { printf 'tiermem: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 1
}

# Prints the first usable interpreter.
find_python() {
    local candidate
    for candidate in ${TIERMEM_PYTHON:-python3.11 python3 python3.12 python3.13 python3.10}; do
        if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python from 3.10 on with venv and ensurepip was found; install Python 3.11, or name one in TIERMEM_PYTHON"
}

hash_files() { # FILE_OR_DIRECTORY...: one hash over names and contents; what is missing counts as such
    (
        cd "$ROOT"
        find "$@" -type f ! -path '*/__pycache__/*' -print0 2>/dev/null | LC_ALL=C sort -z \
            | xargs -0 -r sha256sum
    ) | sha256sum | cut -d' ' -f1
}

deps_hash() { # PYTHON
    { hash_files pyproject.toml tools/constraints.txt; "$1" -VV; printf '%s\n' "$ROOT"; } \
        | sha256sum | cut -d' ' -f1
}

# A compiler or Python headers that appear later count as a change: the core is then tried again.
native_hash() { # PYTHON
    {
        hash_files setup.py native
        "$1" -VV
        command -v "${CC:-gcc}" || echo "no compiler"
        "$1" -c 'import os, sysconfig; print(os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
    } | sha256sum | cut -d' ' -f1
}

stamped() { [ -f "$STAMPS/$1" ] && [ "$(cat "$STAMPS/$1")" = "$2" ]; } # NAME HASH

stamp() { # NAME HASH
    mkdir -p "$STAMPS"
    printf '%s\n' "$2" >"$STAMPS/$1.$$"
    mv "$STAMPS/$1.$$" "$STAMPS/$1"
}

pip_install() {
    # shellcheck disable=SC2086  # TIERMEM_PIP_ARGS is a list of words
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c "$ROOT/tools/constraints.txt" ${TIERMEM_PIP_ARGS:-} "$@"
}

make_venv() {
    if [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c \
        'import sys, pip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
        return
    fi
    local python
    python="$(find_python)"
    say "making $VENV with $("$python" -V)"
    "$python" -m venv --clear "$VENV"
}

# Packages and, through the editable install, the native core. The build tools come first, so that
# one constrained environment serves the build as well.
install_packages() { # EXTRAS HASH
    say "installing packages (torch is large: the first time takes minutes)"
    pip_install setuptools wheel cffi
    (cd "$ROOT" && rm -f tiermem/_native*.so && pip_install --no-build-isolation -e ".[$1]")
    local extra
    for extra in ${1//,/ }; do
        stamp "deps-$extra" "$2"
    done
}

build_native() {
    say "building the native core"
    (
        cd "$ROOT"
        rm -f tiermem/_native*.so
        "$VENV/bin/python" setup.py --quiet build_ext --inplace --force
    ) >"$STAMPS/native.log" 2>&1 || true
}

has_native() { (cd "$ROOT" && "$VENV/bin/python" -c 'import tiermem._native' 2>>"$STAMPS/native.log"); }

warn_without_native() {
    say "WARNING: the native core is missing; everything works, on Python I/O threads and torch"
    say "WARNING: kernels, several times slower. Install a C compiler (gcc) and the Python headers"
    say "WARNING: and run this again to get it. The build's own words: $STAMPS/native.log"
}

# Brings the environment up to date for EXTRAS (for instance "train,dev"). Safe to run twice at once:
# the second waits for the first and finds its work done.
ensure_env() { # EXTRAS
    if command -v flock >/dev/null; then
        exec 9<"$ROOT"
        flock 9
    fi
    make_venv
    mkdir -p "$STAMPS"
    local deps native extra missing=""
    deps="$(deps_hash "$VENV/bin/python")"
    native="$(native_hash "$VENV/bin/python")"
    for extra in ${1//,/ }; do
        stamped "deps-$extra" "$deps" || missing="$extra"
    done
    if [ -n "$missing" ]; then
        install_packages "$1" "$deps"
        # pip hides why a build failed: build once more, in the open.
        has_native || build_native
        stamp native "$native"
    elif ! stamped native "$native"; then
        build_native
        stamp native "$native"
    fi
    ls "$ROOT"/tiermem/_native*.so >/dev/null 2>&1 || warn_without_native
    if command -v flock >/dev/null; then
        exec 9<&-
    fi
}
