#!/bin/sh
# install_locked.sh PYTHON LOCK: torch and the packages of locks/LOCK.txt into PYTHON's environment. Every file is checked
# by its SHA-256, and none is built from source. TORCH_BUILD is cpu or cuda; unset, it is cpu where the machine's index
# has that build. One that no lock knows, such as a machine's own for Arm, is taken at the index's word, and said.
set -eu
python=$1
lock=$2
locks=$(cd "$(dirname "$0")/.." && pwd)/locks

install() {
    "$python" -m pip install --quiet --require-hashes --no-deps --only-binary :all: -r "$locks/$1.txt"
}

unlocked_cpu() {
    version=$(sed -n 's/^\(torch==[^ ]*+cpu\).*/\1/p' "$locks/cpu.txt")
    "$python" -m pip install --quiet --no-deps --only-binary :all: "$version" 2>/dev/null &&
        echo "$version for this machine is in no lock: it was installed unchecked." >&2
}

case ${TORCH_BUILD:-} in
    cpu | cuda) install "$TORCH_BUILD" ;;
    "") install cpu 2>/dev/null || unlocked_cpu || install cuda ;;
    *) echo "TORCH_BUILD=$TORCH_BUILD: it is cpu or cuda" >&2 && exit 2 ;;
esac
install "$lock"
