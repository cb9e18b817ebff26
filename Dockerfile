# syntax=docker/dockerfile:1
# One image on one of two bases, as DEVICE says: `gpu` (the default) is SGLang's own image, `cpu` is plain Python. `make image`
# and `make image-cpu` pass the arguments; image/README.md says what each is for.
ARG DEVICE=gpu
ARG BASE_IMAGE=scratch
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim


# What builds, installs and describes. Nothing of the next two stages stays in an image.
FROM ${PYTHON_IMAGE} AS tools
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY requirements /requirements
RUN --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m pip install --quiet --no-cache-dir --require-hashes --target /tools -r /requirements/bootstrap.lock \
    && python3 -m pip install --quiet --no-cache-dir --require-hashes --target /sbom -r /requirements/sbom.lock \
    && awk '/^sglang==/ {on = 1} on {print} on && !/\\$/ {exit}' /requirements/engine.lock > /tmp/sglang.txt \
    && python3 -m pip download --quiet --no-cache-dir --no-deps --require-hashes --dest /published -r /tmp/sglang.txt


# With this package as a wheel: what the last step of both targets takes in, see image/install.sh.
FROM tools AS materials
COPY . /source
# Buildah knows a step by its words and not by what it mounts: a new BUILD_ID runs this and the last step anew.
ARG BUILD_ID
RUN --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    /tools/bin/uv build --quiet --no-cache --wheel --build-constraints /source/requirements/engine.lock --require-hashes \
        --out-dir /wheel /source


# The engine's dependencies as locked, SGLang among them as published.
FROM ${PYTHON_IMAGE} AS dependencies
COPY requirements/bootstrap.lock requirements/engine.lock /usr/share/doc/sglang-dflash/
RUN --mount=type=cache,target=/var/cache/uv \
    --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca SSL_CERT_FILE=/run/secrets/ca; fi; \
    locks=/usr/share/doc/sglang-dflash \
    && python3 -m pip install --quiet --no-cache-dir --require-hashes --target /tmp/tools -r $locks/bootstrap.lock \
    && /tmp/tools/bin/uv venv --quiet --python "$(command -v python3)" /opt/sglang-dflash \
    && /tmp/tools/bin/uv pip sync --python /opt/sglang-dflash --cache-dir /var/cache/uv --link-mode copy \
        --compile-bytecode --require-hashes $locks/engine.lock \
    && rm -r /tmp/tools


FROM dependencies AS cpu
ENV PATH=/opt/sglang-dflash/bin:$PATH \
    SGLANG_PLATFORM=cpu_reference


FROM ${BASE_IMAGE} AS gpu


FROM ${DEVICE} AS image
USER 0
ARG BUILD_ID SERIES_HASH
RUN --mount=type=bind,from=materials,target=/materials : "$BUILD_ID"; /materials/source/image/install.sh "$SERIES_HASH"
# As the chart sets them: every cache has its place on a volume.
ENV HOME=/cache \
    XDG_CACHE_HOME=/cache/xdg \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    FLASHINFER_WORKSPACE_BASE=/cache \
    SGLANG_CACHE_DIR=/cache/sglang \
    SGLANG_DG_CACHE_DIR=/cache/deep_gemm \
    CUDA_CACHE_PATH=/cache/cuda \
    NUMBA_CACHE_DIR=/cache/numba \
    OUTLINES_CACHE_DIR=/cache/outlines \
    HF_HOME=/models \
    TMPDIR=/tmp \
    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false
ARG SOURCE REVISION VERSION UPSTREAM_VERSION BASE_NAME BASE_DIGEST
LABEL org.opencontainers.image.title="sglang-dflash" \
    org.opencontainers.image.description="SGLang with a bounded DFLASH draft KV pool and visible pools" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.source="$SOURCE" \
    org.opencontainers.image.revision="$REVISION" \
    org.opencontainers.image.version="$VERSION" \
    org.opencontainers.image.base.name="$BASE_NAME" \
    org.opencontainers.image.base.digest="$BASE_DIGEST" \
    sglang-dflash.sglang.version="$UPSTREAM_VERSION" \
    sglang-dflash.series.sha256="$SERIES_HASH"
WORKDIR /cache
VOLUME ["/cache", "/models"]
EXPOSE 30000
STOPSIGNAL SIGTERM
USER 1000:0
ENTRYPOINT ["sglang-dflash", "serve"]
