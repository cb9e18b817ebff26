#!/bin/sh
# The step of the Dockerfile that both bases share: this package, the patches, the self-test and the SBOM, into the
# Python that is on the path. `install.sh [SERIES_HASH]`; the Dockerfile's stage `materials` is what it takes.
set -eu
materials=/materials
documents=/usr/share/doc/sglang-dflash
python=$(command -v python3)
# The distribution's own Python asks for --break-system-packages; a virtual environment does not mind it.
$materials/tools/bin/uv pip install --quiet --no-cache --python "$python" --break-system-packages --no-index --no-deps \
    --link-mode copy $materials/wheel/*.whl
"$python" -m server_ext.image.bake --published $materials/published/*.whl ${1:+--series-hash "$1"}
mkdir -p $documents
cp $materials/source/LICENSE $materials/source/NOTICE $documents
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$materials/sbom "$python" -m server_ext.image.sbom $documents/sbom.spdx.json
# For any user id: its group is 0 unless somebody says otherwise.
mkdir -p /cache /models
chmod 0775 /cache /models
