#!/bin/sh
# install_locked.sh PYTHON LOCK: torch and the packages of locks/LOCK.txt into PYTHON's environment. Every file is checked
# by its SHA-256, and none is built from source. TORCH_BUILD is cpu or cuda; unset, it is cpu where the machine's index
# has that build.
set -eu
python=$1
lock=$2
locks=$(cd "$(dirname "$0")/.." && pwd)/locks

install() {
    "$python" -m pip install --quiet --require-hashes --no-deps --only-binary :all: -r "$locks/$1.txt"
}

case ${TORCH_BUILD:-} in
    cpu | cuda) install "$TORCH_BUILD" ;;
    "") install cpu 2>/dev/null || install cuda ;;
    *) echo "TORCH_BUILD=$TORCH_BUILD: it is cpu or cuda" >&2 && exit 2 ;;
esac
install "$lock"
