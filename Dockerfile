# syntax=docker/dockerfile:1
# Two targets: `gpu` (the default) on SGLang's own image, `cpu` on plain Python. `make image` and `make image-cpu` pass the
# arguments; image/README.md says what each is for.
ARG BASE_IMAGE=scratch
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim


# What builds, installs and describes; nothing of this stage stays in an image.
FROM ${PYTHON_IMAGE} AS tools
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN --mount=type=bind,source=requirements,target=/requirements \
    --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    python3 -m pip install --quiet --no-cache-dir --require-hashes --target /tools -r /requirements/bootstrap.lock \
    && python3 -m pip install --quiet --no-cache-dir --require-hashes --target /sbom -r /requirements/sbom.lock \
    && awk '/^sglang==/ {on = 1} on {print} on && !/\\$/ {exit}' /requirements/engine.lock > /tmp/sglang.txt \
    && python3 -m pip download --quiet --no-cache-dir --no-deps --require-hashes --dest /published -r /tmp/sglang.txt


# This package as a wheel, the same for both targets.
FROM tools AS wheel
COPY . /source
RUN --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    /tools/bin/uv build --quiet --no-cache --wheel --build-constraints /source/requirements/engine.lock --require-hashes \
        --out-dir /wheel /source \
    && mkdir -p /licences && cp /source/LICENSE /source/NOTICE /licences


# The engine's dependencies as locked, SGLang among them as published.
FROM ${PYTHON_IMAGE} AS dependencies
RUN --mount=type=bind,from=tools,source=/tools,target=/tools \
    --mount=type=bind,source=requirements,target=/requirements \
    --mount=type=cache,target=/var/cache/uv \
    --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    /tools/bin/uv venv --quiet --python "$(command -v python3)" /opt/sglang-dflash \
    && /tools/bin/uv pip sync --python /opt/sglang-dflash --cache-dir /var/cache/uv --link-mode copy \
        --compile-bytecode --require-hashes /requirements/engine.lock


FROM dependencies AS cpu
ENV PATH=/opt/sglang-dflash/bin:$PATH \
    SGLANG_PLATFORM=cpu_reference
ARG SERIES_HASH
RUN --mount=type=bind,from=tools,source=/tools,target=/tools \
    --mount=type=bind,from=tools,source=/sbom,target=/sbom \
    --mount=type=bind,from=tools,source=/published,target=/published \
    --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    --mount=type=bind,from=wheel,source=/source/image/install.sh,target=/install.sh \
    /install.sh "$SERIES_HASH"
COPY --from=wheel /licences /usr/share/doc/sglang-dflash
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


FROM ${BASE_IMAGE} AS gpu
USER 0
ARG SERIES_HASH
RUN --mount=type=bind,from=tools,source=/tools,target=/tools \
    --mount=type=bind,from=tools,source=/sbom,target=/sbom \
    --mount=type=bind,from=tools,source=/published,target=/published \
    --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    --mount=type=bind,from=wheel,source=/source/image/install.sh,target=/install.sh \
    /install.sh "$SERIES_HASH"
COPY --from=wheel /licences /usr/share/doc/sglang-dflash
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
