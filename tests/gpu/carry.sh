#!/usr/bin/env bash
# Packs what a GPU machine without a package index lacks into one folder, to be carried there:
#     tests/gpu/carry.sh FOLDER [KIT]
# and there:  python3 tests/gpu/check.py --carried FOLDER
#
# Wheels are for Python 3.12 on x86-64 Linux; torch, triton, transformers, numpy and ninja have to be
# there already. KIT: a folder with FlashInfer cut to the parts that are needed (flashinfer_py.txz,
# flashinfer_data.txz, flashinfer_ops_*.txz, and its loader's wheel); without it FlashInfer is taken
# to be installed there, or is left out.
set -euo pipefail
folder=${1:?usage: carry.sh FOLDER [KIT]}
kit=${2:-}
mkdir -p "$folder"

platforms=()
for version in 2_28 2_27 2_24 2_17 2_12 2_5; do
    platforms+=(--platform "manylinux_${version}_x86_64")
done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
# The engine's own needs, then FlashInfer's.
packages=(xxhash llguidance)
[ -z "$kit" ] || packages+=(nvidia-ml-py tabulate einops)
for package in "${packages[@]}"; do
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp "${platforms[@]}" -d "$folder" "$package"
done
[ -z "$kit" ] || cp -f "$kit"/*.whl "$kit"/*.txz "$folder/"
du -sh "$folder"
