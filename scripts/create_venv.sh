#!/bin/sh
# create_venv.sh FOLDER: makes a virtual environment with the first Python >= 3.11 found (PYTHON names one).
# What the build will need and the system lacks is named at once, in one line.
set -eu
folder=$1
[ -x "$folder/bin/python" ] && exit 0

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "pagedinfer: error: no Python >= 3.11 found (tried ${PYTHON:-python3, python3.11 to python3.14});" \
    "install one, or name it: make PYTHON=/path/to/python3" >&2
  exit 1
fi

missing=
"$python" -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
  missing="$missing python3-dev"
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || missing="$missing g++"
if [ -n "$missing" ]; then
  echo "pagedinfer: error: missing on this system:$missing. On Debian or Ubuntu: apt-get install$missing" \
    "(for $("$python" --version))" >&2
  exit 1
fi

echo "pagedinfer: creating $folder with $("$python" --version) ($(command -v "$python"))"
# A half-made environment would be taken for a whole one.
"$python" -m venv "$folder" || { rm -rf "$folder"; exit 1; }
